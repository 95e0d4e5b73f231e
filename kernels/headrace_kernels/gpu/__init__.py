"""The Triton backend: modules and functions as in the reference, for CUDA tensors. Kernels are in ``kernels/``."""
