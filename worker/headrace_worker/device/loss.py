"""What has ended a device, as a sentence."""

from headrace_worker.device.rank_device import RankDevice


def loss_sentence(device: RankDevice, error: BaseException) -> str:
    """The error of a step, if it has ended the device for this process; else empty.

    It may wait for what the device runs: not to be called once another rank is lost, for which its kernels may wait.
    """
    if not device.is_lost(error):
        return ""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{device.torch_device} is in error ({type(error).__name__}: {first_line[:200]})"
