"""One rank's NIXL agent: its pools, readable by other replicas' ranks, and reads of theirs.

UCX, below it, takes shared memory, CUDA IPC, TCP or RDMA, whatever reaches the other rank fastest. Nothing of it runs
on a thread of its own: notices arrive, and over TCP reads of this rank's memory go on, while `notices` is called.
"""

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_base.errors import HeadraceError

Pieces = NDArray[np.uint64]  # [n, 2]: address, bytes


class TransfersUnavailableError(HeadraceError):
    """NIXL cannot be used here."""


class UnknownBackendError(HeadraceError):
    """NIXL has no such backend."""


class ReadFailedError(HeadraceError):
    """Another rank's memory cannot be read."""


def load_nixl() -> Any:
    """The module of NIXL for torch's CUDA; on CPUs any. Raises TransfersUnavailableError."""
    wanted = (torch.version.cuda or "13").partition(".")[0]
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    reasons = []
    for major in (wanted,) if torch.version.cuda else (wanted, "12"):
        try:
            return importlib.import_module(f"nixl_cu{major}._api")
        except (ImportError, OSError) as error:
            reasons.append(str(error))
    raise TransfersUnavailableError(
        f"KV blocks cannot be moved between replicas: {reasons[0][:200]}. Install nixl-cu{wanted}, or serve without "
        "pools for prefill and decode."
    )


class Reading:
    """A read that is under way: until `done`, it may write its pieces. It cannot be stopped."""

    def __init__(self, agent: Any, handle: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._agent, self._handle = agent, handle
        self._state = self._checked(lambda: agent.transfer(handle))

    def done(self) -> bool:
        """Whether it is over. Raises ReadFailedError when it has failed: then it is over, too."""
        if self._state == "PROC":
            self._state = self._checked(lambda: self._agent.check_xfer_state(self._handle))
        if self._state == "ERR":
            raise ReadFailedError("another rank's memory cannot be read: its replica may have ended")
        if self._state == "DONE" and self._handle is not None:
            self._handle.release()
            self._handle = None
        return bool(self._state == "DONE")

    @staticmethod
    def _checked(call: Any) -> str:
        try:
            return str(call())
        except Exception:  # NIXL has an exception for each cause
            return "ERR"


class KvAgent:
    """For one thread."""

    def __init__(self, name: str, tensors: Sequence[Tensor], transport: str = "ucx") -> None:
        """name: of no other agent. tensors: contiguous, on one device. transport: as in `ReplicaSettings.kv_transfer`.

        Raises TransfersUnavailableError, UnknownBackendError.
        """
        nixl = load_nixl()
        backend, _, devices = transport.partition(":")
        if devices:
            os.environ["UCX_NET_DEVICES"] = devices  # UCX reads it when the agent is made
        self._tensors = list(tensors)  # kept as long as they can be read
        try:
            self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
            if backend.upper() not in self._agent.get_plugin_list():
                known = ", ".join(self._agent.get_plugin_list()).lower()
                raise UnknownBackendError(f"--kv-transfer {transport}: NIXL has no such backend here, but {known}.")
            self._agent.create_backend(backend.upper())
            self._registered = self._agent.register_memory(self._tensors)
        except UnknownBackendError:
            raise
        except Exception as error:
            raise TransfersUnavailableError(
                f"NIXL cannot register the KV cache (--kv-transfer {transport}): {str(error)[:200]}. Serve without "
                "pools for prefill and decode."
            ) from error
        self.name = name
        self._uses: Counter[str] = Counter()

    @property
    def metadata(self) -> bytes:
        """What other agents need to read the memory that is registered by now."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, tensors: Sequence[Tensor]) -> None:
        """Host memory, for copies within this agent. Raises TransfersUnavailableError."""
        try:
            self._agent.register_memory(list(tensors))
        except Exception as error:
            raise TransfersUnavailableError(f"NIXL cannot register host memory: {str(error)[:200]}.") from error
        self._tensors += tensors

    def connect(self, metadata: bytes) -> str:
        """Returns the other agent's name. Raises ReadFailedError."""
        try:
            name = self._agent.add_remote_agent(metadata).decode()
        except Exception as error:
            raise ReadFailedError(f"another rank's agent cannot be reached: {str(error)[:200]}") from error
        self._uses[name] += 1
        return str(name)

    def disconnect(self, name: str) -> None:
        """Once for each `connect`, when no read from it is under way."""
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
            with contextlib.suppress(Exception):  # it has ended before
                self._agent.remove_remote_agent(name)

    def notify(self, name: str, notice: bytes) -> None:
        """Sends a few bytes to another agent; lost if it has ended."""
        with contextlib.suppress(Exception):  # a class for each cause
            self._agent.send_notif(name, notice)

    def notices(self) -> list[tuple[str, bytes]]:
        """Those that have arrived since the last call, by their sender."""
        found = self._agent.get_new_notifs()
        return [
            (name.decode() if isinstance(name, bytes) else name, notice)
            for name, notices in found.items()
            for notice in notices
        ]

    def read(self, name: str, theirs: Pieces, mine: Pieces, their_device: int, my_device: int) -> Reading:
        """Begins to read pieces of an agent's memory into this one's. Devices: of GPUs; -1 = host memory.

        Raises ReadFailedError.
        """
        try:
            handle = self._agent.initialize_xfer(
                "READ", self._list(mine, my_device), self._list(theirs, their_device), name
            )
        except Exception as error:
            raise ReadFailedError(f"another rank's memory cannot be read: {str(error)[:200]}") from error
        return Reading(self._agent, handle, int(mine[:, 1].sum()))

    def _list(self, pieces: Pieces, device: int) -> Any:
        index = np.full(len(pieces), max(device, 0), np.uint64)
        return self._agent.get_xfer_descs(np.column_stack((pieces, index)), "DRAM" if device < 0 else "VRAM")

    def close(self) -> None:
        """When no read is under way."""
        self._agent.deregister_memory(self._registered)
