"""Shapes of named models' KV caches and where their bytes lie in a paged pool."""
