"""Makes ``scripts.figures`` importable by ``scripts/crosscheck`` and its tests; not part of the wheel."""
