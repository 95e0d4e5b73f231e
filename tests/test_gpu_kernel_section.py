"""The section of the kernel tests: a file whose process ends is reported, and the other files run."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_bench.sections import kernels


def test_a_file_that_ends_its_process_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_a.py").write_text("import os\ndef test_fault():\n    os.abort()\n")
    (tmp_path / "test_b.py").write_text("def test_right():\n    pass\ndef test_wrong():\n    assert False\n")
    monkeypatch.setattr(kernels, "KERNEL_TESTS", tmp_path)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    order: Any = SimpleNamespace(small=False, ends_at=time.monotonic() + 120)
    passed, check = kernels.run(order)
    assert passed.value == 1 and "skipped" in passed.extra
    assert check.extra["failed"] == ["test_a.py: status -6", "test_b.py::test_wrong", "test_b.py: status 1"]


def test_a_file_without_time_is_no_failed_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_a.py").write_text(
        "import time\ndef test_first():\n    pass\ndef test_slow():\n    time.sleep(60)\n"
    )
    monkeypatch.setattr(kernels, "KERNEL_TESTS", tmp_path)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    found = []
    for left in (0.0, 5.0):
        order: Any = SimpleNamespace(small=False, ends_at=time.monotonic() + left + kernels.RESERVED_SECONDS)
        passed, check = kernels.run(order)
        found.append((passed.value, check.extra["failed"]))
    assert found == [
        (0, ["test_a.py: not run: no time was left"]),
        (1, ["test_a.py: not finished: no time was left"]),
    ]
