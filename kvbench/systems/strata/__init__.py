"""Strata (OSDI 2026): moving KV pages between tiers, and what hides behind the computation."""
