"""Checks in a child process, with the worker package, whether models can be built as the spec describes.

This process never imports torch. The memory footprint of a model is stored in the state folder: the next start with
the same model, shape and versions does not wait for the child.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.local import state
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.footprint import Footprint, PreflightResult

_MODULE = "headrace_worker.model.preflight"
_SECONDS = 120.0
_MAX_FILES = 100


class Preflight:
    """Checks each (config, revision of the model): the child starts at once, `finish` returns the results."""

    def __init__(self, builds: Sequence[tuple[ReplicaConfig, str]] = ()) -> None:
        self._files = [_file(config, revision) for config, revision in builds]
        self._footprints = [_read(file) for file in self._files]
        self._unknown = [index for index, footprint in enumerate(self._footprints) if footprint is None]
        self._names = [config.model for config, _ in builds]
        self._process = _start([builds[index][0] for index in self._unknown]) if self._unknown else None

    def finish(self) -> list[Footprint | None]:
        """The footprint of each build, in order; None without a result: the ranks check again.

        Raises ReplicaFailedError with the sentence with which the ranks would fail.
        """
        if self._process is None:
            return self._footprints
        try:
            written, _ = self._process.communicate(timeout=_SECONDS)
            result = msgspec.msgpack.decode(written, type=PreflightResult)
        except (subprocess.TimeoutExpired, msgspec.MsgspecError):
            self.close()
            return self._footprints
        for index, footprint in zip(self._unknown, result.footprints, strict=False):
            self._footprints[index] = footprint
            _store(self._files[index], footprint)
        if result.error:
            name = self._names[self._unknown[len(result.footprints)]]
            raise ReplicaFailedError(f"{name}: {result.error}")
        return self._footprints

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()


def _start(configs: Sequence[ReplicaConfig]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],  # no module of this folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A Hub model has been downloaded before.
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,  # the terminal's Ctrl-C must not reach it
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # then `finish` has no result
        process.stdin.write(msgspec.msgpack.encode(configs))
        process.stdin.close()
    process.stdin = None  # communicate() would flush it
    return process


def _file(config: ReplicaConfig, revision: str) -> Path | None:
    """The file of the result. None for a model with its own code, which may change while the revision does not."""
    if config.trust_remote_code:
        return None
    same = replace(config, model="", source="", revision=revision)
    versions = [version(name) for name in ("headrace", "torch", "transformers")]
    digest = blake2b(msgspec.msgpack.encode([same, versions]), digest_size=16)
    return state.home() / "footprints" / digest.hexdigest()


def _read(file: Path | None) -> Footprint | None:
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=Footprint) if file is not None else None
    except (OSError, msgspec.MsgspecError):
        return None


def _store(file: Path | None, footprint: Footprint) -> None:
    """Errors are ignored: with a full disk only the next start takes some seconds longer."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        for old in sorted(file.parent.iterdir(), key=lambda entry: entry.stat().st_mtime)[: -(_MAX_FILES - 1)]:
            old.unlink()
        file.write_bytes(msgspec.msgpack.encode(footprint))
