"""Small CUDA C++ kernels and how they become machine code. Importing this loads neither numba nor the driver."""
