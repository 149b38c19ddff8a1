"""Virtual memory management: one protocol for address ranges and physical chunks, and its drivers."""
