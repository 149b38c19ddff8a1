"""DirectKV (OSDI 2026): the far tier read in place, in an order that pays for it once."""
