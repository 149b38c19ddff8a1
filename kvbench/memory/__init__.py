"""Where bytes live: exact, placed and verified buffers and files per tier (design 3, 6.1)."""
