"""NEO (MLSys 2025): decode attention of some requests on the CPU, hidden under the GPU's work on the others."""
