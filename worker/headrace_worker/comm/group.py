"""Process groups made directly from a store: no global state of torch.distributed, so that many can coexist.

gloo transfers tensors in host memory, NCCL tensors on a GPU.
"""

import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _enable_record_function as enable_record_function
from torch._C._distributed_c10d import PrefixStore, Store

from headrace_base.errors import DeviceError
from headrace_worker.comm.failure_detection import FailureDetector

# An idle replica waits for its next plan without a limit; the failure detector reports a lost peer.
_FOREVER = timedelta(days=1000)

ABORT_SECONDS = 1.0
"""From a loss until kernels that wait are ended: by then every rank has learned of it."""


@dataclass(slots=True)
class Sending:
    """A send that may still read its tensor."""

    work: Any
    tensor: Tensor


@dataclass(slots=True)
class Receiving:
    """A receive that may still write its tensor."""

    work: Any
    tensor: Tensor


class Group:
    """Some ranks of a replica that exchange tensors. Errors are raised as RankLostError, which names the lost rank."""

    def __init__(self, backend: Any, rank: int, size: int, detector: FailureDetector) -> None:
        self.rank = rank
        self.size = size
        self.detector = detector
        self._backend = backend

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        """Begin to send a contiguous tensor, which must not change until `finish`."""
        # Hidden from profilers: a send ends after the step that began it, and its end would be written into the memory
        # of a profiler that has been stopped meanwhile.
        enable_record_function(False)
        try:
            return Sending(self._backend.send([tensor], to, tag), tensor)
        except RuntimeError as error:
            raise self.detector.explain(error) from error
        finally:
            enable_record_function(True)

    def finish(self, sending: Sending) -> None:
        """Wait until a send no longer needs its tensor; on a GPU the current stream waits."""
        self._wait(sending.work)

    def expect(self, tensor: Tensor, source: int, tag: int = 0) -> Receiving:
        """Begin to fill a contiguous tensor with what `source` sends."""
        try:
            return Receiving(self._backend.recv([tensor], source, tag), tensor)
        except RuntimeError as error:
            raise self.detector.explain(error) from error

    def take(self, receiving: Receiving) -> Tensor:
        """The tensor, once it is filled; on a GPU the current stream waits for it."""
        self._wait(receiving.work)
        return receiving.tensor

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Tensor:
        """Fill a contiguous tensor with what `source` sends; on a GPU the current stream waits for it."""
        return self.take(self.expect(tensor, source, tag))

    def abort(self) -> threading.Thread:
        """Ends the kernels of an NCCL group that wait for a rank, from any thread; nothing can be exchanged after it.

        Such a kernel exits as if its data had arrived, and may still send to other ranks: what a step computes is not
        used unless no rank was lost by the time that it was read (`FailureDetector.check`), and it takes ABORT_SECONDS
        until the first kernel exits. Without the abort the GPU stays busy, and the process may not exit.

        Returns at once. The thread does not end while recordings of the group's collectives exist (NCCL waits for
        them); the kernels end before.
        """
        thread = threading.Thread(target=self._abort, name="headrace-nccl-abort", daemon=True)
        thread.start()
        return thread

    def _abort(self) -> None:
        time.sleep(ABORT_SECONDS)
        with contextlib.suppress(RuntimeError):  # a communicator that is in error already
            self._backend.abort()

    def gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]: the tensor of each rank."""
        out = tensor.new_empty((self.size, *tensor.shape))
        # As bytes: backends support fewer dtypes than models use.
        parts = [part.view(-1).view(torch.uint8) for part in out]
        try:
            work = self._backend.allgather([parts], [tensor.contiguous().view(-1).view(torch.uint8)])
        except RuntimeError as error:
            raise self.detector.explain(error) from error
        self._wait(work)
        return out

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place, in the backend's own order, which is the same on all ranks."""
        try:
            work = self._backend.allreduce([tensor])
        except RuntimeError as error:
            raise self.detector.explain(error) from error
        self._wait(work)
        return tensor

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self.detector.explain(error) from error


def host_group(store: Store, name: str, host: str, rank: int, size: int, detector: FailureDetector) -> Group:
    """A gloo group that listens on the interface of `host`. All members must call this at about the same time."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    options._threads = 1
    options._timeout = _FOREVER
    try:
        backend = gloo(PrefixStore(name, store), rank, size, options)
    except RuntimeError as error:
        raise detector.explain(error) from error
    return Group(backend, rank, size, detector)


def device_group(
    store: Store, name: str, device: torch.device, rank: int, size: int, detector: FailureDetector
) -> Group:
    """An NCCL group of ranks with one GPU each, aborted when a rank is lost.

    Raises DeviceError where this torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise DeviceError("this build of torch has no NCCL: ranks on GPUs cannot communicate; install torch with CUDA")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _FOREVER
    try:
        backend = nccl(PrefixStore(name, store), rank, size, options)
        backend.eager_connect_single_device(device)
    except RuntimeError as error:
        raise detector.explain(error) from error
    group = Group(backend, rank, size, detector)
    detector.on_loss(lambda failure: group.abort())
    return group
