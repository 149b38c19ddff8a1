"""Readers of public trace formats. :func:`kvbench.replay.traces.trace.open_trace` is the way in."""
