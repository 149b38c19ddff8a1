"""Host kernels (numba over LLVM intrinsics) on raw addresses; importing one loads numba: measuring code only."""
