"""What ``scripts/crosscheck`` measures: one module a group of figures, each figure with its target and a verdict."""
