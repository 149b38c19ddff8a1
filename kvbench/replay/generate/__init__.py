"""Seeded generators of requests. :func:`kvbench.replay.generate.presets.preset` is the way in."""
