"""What stored numbers mean: fits, comparisons, gates, change points and claims. Measures nothing."""
