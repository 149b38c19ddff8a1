"""Reads what this box is: topology, fingerprint, identity, physical ceilings, state in a window. Measures nothing."""
