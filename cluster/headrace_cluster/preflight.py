"""Asks the worker room whether models can be split as the spec says, before any rank is placed.

A replica of many ranks that cannot be would else start as many processes, each to say the same.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.spec import ModelSpec
from headrace_worker.config import ReplicaConfig

_MODULE = "headrace_worker.model.preflight"
_REFUSED = 1
_SECONDS = 120.0


class Preflight:
    """Runs in a process of its own, beside the start of Ray: this one never imports torch."""

    def __init__(self, models: Iterable[ModelSpec]) -> None:
        self._checks: list[tuple[ModelSpec, Any]] = []
        for model in models:
            shapes = {(pool.tp, pool.pp): model.shaped(pool) for pool in model.pools}
            for shaped in shapes.values():
                if shaped.ranks > 1:
                    self._checks.append((shaped, self._start(shaped)))

    def finish(self) -> None:
        """Waits for the answer. Raises ReplicaFailedError with the sentence."""
        for model, process in self._checks:
            try:
                sentence, _ = process.communicate(timeout=_SECONDS)
            except subprocess.TimeoutExpired:
                continue  # the ranks will say
            if process.returncode == _REFUSED and sentence.strip():
                raise ReplicaFailedError(f"{model.name}: {sentence.decode().strip()}")

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        for _, process in self._checks:
            if process.poll() is None:
                process.kill()
            process.wait()

    @staticmethod
    def _start(model: ModelSpec) -> "subprocess.Popen[bytes]":
        config = ReplicaConfig(
            replica_id="preflight",
            model=model.name,
            source=model.source,
            revision=model.revision,
            tp=model.tp,
            pp=model.pp,
            ep=model.ep,
            load_format=model.load_format,
            max_model_len=model.max_model_len,
            block_size=model.block_size,
            secret=b"",
            trust_remote_code=model.trust_remote_code,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # the command line's Ctrl-C is not for it
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(config))
        process.stdin.close()
        process.stdin = None  # communicate() would flush it
        return process
