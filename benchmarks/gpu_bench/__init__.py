"""Sections of the GPU benchmark, each measured in a process of its own: benchmarks/gpu.py runs them."""
