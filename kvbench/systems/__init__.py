"""The mechanisms of the papers, one package a system; they know no clock, store or command line."""
