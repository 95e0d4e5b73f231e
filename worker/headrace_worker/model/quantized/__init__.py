"""Checkpoints whose matrices are stored in few bits: what their config says, and how their tensors are read."""
