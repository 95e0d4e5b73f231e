"""C++ kernels for float32 on a CPU, compiled on first use for the CPU they run on."""
