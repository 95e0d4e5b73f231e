"""`headrace check-accuracy`: a model as it is served, beside plain transformers; what is damaged is found."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headrace_base.errors import MemoryTooSmallError, ModelUnsupportedError
from headrace_cluster.cli.app import app
from headrace_worker.accuracy import EXACT, Accuracy, check, compare, dense, served, windows
from headrace_worker.assembly.assemble import assemble
from headrace_worker.device.cpu import CpuDevice
from support.worker.quantized import save_quantized
from support.worker.tiny_models import TINY, replica_config, save_random

TEXT = "The quick brown fox jumps over the lazy dog, and again. " * 6
DAMAGED = "model.layers.1.mlp.up_proj.weight"


def _damage(folder: Path) -> None:
    """A scale of one block is twice as large."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DAMAGED}_scale_inv"][0, 0] *= 2
    tensors[f"{DAMAGED}_scale_inv"][1, 1] *= -1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", ["llama-16", "qwen3_5_text", "deepseek_v3"])
def test_a_served_model_is_within_its_bound(tiny: Callable[..., Path], family: str) -> None:
    found = check(replica_config(tiny(family)), TEXT, 200)
    assert found.bound == EXACT and found.is_right and found.original is None
    assert found.dense.positions > 190 and found.dense.same == 1 and abs(found.dense.likelihood) < 1e-4


def test_a_damaged_scale_is_found(tiny: Callable[..., Path], tmp_path: Path) -> None:
    twin = save_quantized(tiny("llama"), tmp_path, "fp8-block")
    config = replica_config(tmp_path / "quantized")
    right = check(config, TEXT, 200, original=str(twin))
    assert right.is_right and right.original is not None and right.original.divergence < 1e-6
    _damage(tmp_path / "quantized")
    found = check(config, TEXT, 200, original=str(twin))
    assert found.dense.is_within(EXACT), "both were read from the same files"
    assert not found.is_right and [name for name, _ in found.apart] == [DAMAGED]
    assert found.original is not None and found.original.divergence > 1e-3
    other = save_random({"model_type": "llama"} | TINY | {"hidden_size": 32}, tmp_path / "other")
    with pytest.raises(ModelUnsupportedError, match="has no matrix with the name and shape"):
        check(config, TEXT, 50, original=str(other))
    # What a wrong reader or kernel would do: the served values are not those of the files.
    sequences = [list(range(3, 90))]
    logits = served(assemble(config), sequences)
    assert not compare(logits, dense(replica_config(twin)), sequences).is_within(EXACT)


def test_a_reference_that_does_not_fit(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in few bits the reference needs several times the memory of what is served."""
    monkeypatch.setattr(CpuDevice, "free_memory", lambda _: 1 << 18)
    with pytest.raises(MemoryTooSmallError, match=r"with all of its values, .* and the original: .* are free"):
        check(replica_config(tiny("llama")), TEXT, 200, original=str(tiny("llama")))


def test_the_distance_of_distributions(tiny: Callable[..., Path]) -> None:
    """Beside torch's own KL, of logits that have nothing to do with the model."""
    model = dense(replica_config(tiny("llama")))
    sequences = [[5, 6, 7, 8, 9], [10, 11]]
    logits = torch.randn(5, model.vocab_size, generator=torch.Generator().manual_seed(1))
    found = compare(logits, model, sequences)
    exact = served(assemble(replica_config(model.source.path)), sequences)
    apart = torch.nn.functional.kl_div(
        logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert math.isclose(found.divergence, float(apart), rel_tol=1e-4) and found.positions == 5
    following = torch.tensor([6, 7, 8, 9, 11])[:, None]
    gain = (logits.log_softmax(-1) - exact.log_softmax(-1)).gather(1, following).mean()
    assert math.isclose(found.likelihood, float(gain), rel_tol=1e-4)
    with pytest.raises(ModelUnsupportedError, match="give one with the same tokenizer"):
        compare(logits[:, 1:], model, sequences)


def test_the_text_is_cut_into_windows() -> None:
    assert [len(each) for each in windows(range(1200), 1100, 4000)] == [512, 512, 76]
    assert [len(each) for each in windows(range(101), 2048, 50)] == [50, 50], "one token predicts nothing"
    with pytest.raises(ModelUnsupportedError, match="fewer than two tokens"):
        windows([1], 2048, 50)
    assert not Accuracy(5, math.nan, 0.0, 1.0, 0.0).is_within(EXACT)


def test_the_command(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, text = tiny("llama"), tmp_path / "text"
    text.write_text(TEXT)
    run = CliRunner()
    arguments = ["check-accuracy", str(folder), "--text", str(text), "--tokens", "100", "--block-size", "4"]
    found = run.invoke(app, [*arguments, "--json"])
    facts = json.loads(found.stdout)
    assert found.exit_code == 0 and facts["is_right"] and facts["dense"]["positions"] == 99
    found = run.invoke(app, [*arguments, "--reference", str(folder)])
    assert found.exit_code == 0 and found.stdout.count("100.00%") == 2
    for wrong, sentence in ((["--tp", "2"], "one model on one rank"), (["--text", "none"], "cannot be read")):
        failed = run.invoke(app, [*arguments, *wrong])
        assert failed.exit_code and sentence in str(failed.exception), failed
