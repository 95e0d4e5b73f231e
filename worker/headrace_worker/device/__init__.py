"""Device, dtype, memory of this machine, and copies between host and device."""
