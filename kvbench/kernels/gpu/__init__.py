"""GPU kernels as sources, the compilers that build them without a GPU, and the gates their machine code must pass.

Importing this package loads neither triton nor CUDA: those are imported in the child processes of :mod:`.build` and in
:mod:`.fragments` alone.
"""
