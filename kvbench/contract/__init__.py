"""The suite contract: axes, benches, cases, results and how suites are found. Imports only the standard library."""
