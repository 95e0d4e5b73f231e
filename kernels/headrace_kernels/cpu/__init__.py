"""C++ kernels for float32 on a CPU, prebuilt in the wheel, or compiled for the kind of CPU that they run on."""
