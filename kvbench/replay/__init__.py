"""Replaying request traces through scheduling policies: traces, cost tables, event engine, policy adapters."""
