"""Hatch's hook for wheels: compiles the CPU kernels for each kind of CPU, so that no compiler is needed where they run.

Without a compiler, or for a checkout that is installed in place, nothing is built: kernels are compiled at first use.
"""

import importlib.util
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path("kernels/headrace_kernels/cpu/compile_library.py")  # it imports nothing of the project


class PrebuiltKernels(BuildHookInterface[Any]):
    """`initialize` and `finalize` are called before and after a wheel is made."""

    PLUGIN_NAME = "custom"
    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries to the wheel, which is for this machine's kind only then."""
        path = Path(self.root) / BUILD
        if version == "editable" or sys.platform != "linux" or not path.exists():
            return
        spec = importlib.util.spec_from_file_location("headrace_build", path)
        assert spec is not None and spec.loader is not None
        build = sys.modules["headrace_build"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        compiler = build.find_compiler()
        if compiler is None:
            self.app.display_warning("No C++ compiler: the wheel has no CPU kernels, they are compiled where they run.")
            return
        self._folder = Path(tempfile.mkdtemp())
        for target in build.TARGETS:
            library = self._folder / f"{target.name}.so"
            build.build(compiler, target, library)
            build_data["force_include"][str(library)] = f"headrace_kernels/cpu/prebuilt/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the libraries, which are in the wheel now."""
        if self._folder is not None:
            shutil.rmtree(self._folder)
