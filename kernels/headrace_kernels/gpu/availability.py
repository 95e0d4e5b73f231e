"""Whether Triton kernels can run in this process."""

import functools
import importlib.util
import os

import torch

SWITCH = "HEADRACE_TRITON"
EARLY_SWITCH = "HEADRACE_EARLY_LAUNCH"
INTERPRET = "TRITON_INTERPRET"


@functools.cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU; fixed at the first call."""
    return os.environ.get(INTERPRET, "0") not in ("", "0")


@functools.cache
def launches_early() -> bool:
    """Whether attention is launched while the kernel before it runs, and waits for it on the device (programmatic
    dependent launch, from compute capability 9.0 on). Off unless the switch is on; fixed at the first call.
    """
    if os.environ.get(EARLY_SWITCH, "off").lower() != "on" or interpreted():
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def missing() -> str | None:
    """Why the Triton kernels cannot run here, as a sentence; None if they can. Fixed at the first call."""
    switch = os.environ.get(SWITCH, "on").lower()
    if switch not in ("on", "off"):
        return f"{SWITCH}={switch} is neither on nor off"
    if switch == "off":
        return f"{SWITCH}=off"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if not interpreted() and not torch.cuda.is_available():
        return f"torch finds no CUDA device ({INTERPRET}=1 runs the kernels in Triton's interpreter, for tests)"
    return None
