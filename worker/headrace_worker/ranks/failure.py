"""What the other ranks, and users, are told about a failed step: the same on every rank."""

from headrace_base.errors import HeadraceError
from headrace_worker.device.loss import loss_sentence
from headrace_worker.device.rank_device import RankDevice


def failure_sentence(device: RankDevice, error: BaseException) -> str:
    """For any error but RankLostError: one of ours keeps its sentence, and one that ended the device its first line.

    Of any other only the type is named: its message may contain paths or prompts.
    """
    if isinstance(error, HeadraceError):
        return str(error)
    return loss_sentence(device, error) or f"{type(error).__name__} in a step"
