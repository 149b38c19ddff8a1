"""How bytes get from one tier to another: one file a transport. Nothing here knows a clock; a suite owns it."""
