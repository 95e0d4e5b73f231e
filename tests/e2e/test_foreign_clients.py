"""Tools of others against the server: an evaluation by log-likelihoods, and typed answers by instructor."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.model.load import load
from support.e2e.foreign import foreign_python
from support.e2e.headrace_process import Serve
from support.e2e.plain_model import PlainModel

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow",
    "Germany": "Berlin", "Greece": "Athens", "Norway": "Oslo", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
}  # fmt: skip
PLURALS = {"mouse": "mice", "child": "children", "goose": "geese", "tooth": "teeth", "ox": "oxen", "leaf": "leaves"}
SUMS = {f"{a} + {b}": str(a + b) for a, b in ((1, 1), (2, 3), (4, 4), (7, 2), (5, 9), (10, 10), (12, 30), (8, 8))}
TASK = """
task: headrace_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}]
"""
INSTRUCTOR = """
import instructor, openai, pydantic, sys
class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    inhabitants: int = pydantic.Field(ge=0, le=99999999)
    coastal: bool
client = instructor.from_openai(
    openai.OpenAI(base_url=sys.argv[1], api_key="none"), mode=instructor.Mode.JSON_SCHEMA
)
messages = [{"role": "user", "content": "Describe Lisbon."}]
city = client.chat.completions.create(
    model="smollm2", messages=messages, response_model=City, max_retries=0, max_tokens=200, temperature=0
)
assert isinstance(city, City) and city.name, city
print(city)
"""


def _questions() -> list[dict[str, Any]]:
    """Each with four choices: the right one, and those of the next questions."""
    found = []
    for form, pairs in (
        ("The capital of {} is", CAPITALS),
        ("The plural of '{}' is", PLURALS),
        ("{} =", SUMS),
    ):
        keys, answers = list(pairs), list(pairs.values())
        for place, key in enumerate(keys):
            choices = sorted({answers[(place + step) % len(answers)] for step in range(4)})
            found.append({"question": form.format(key), "choices": choices, "answer": choices.index(pairs[key])})
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model's tokenizer as a folder, and itself."""
    facts = load(ReplicaConfig(replica_id="plain", model="plain", source="smollm2", dtype="float32")).facts
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(facts.tokenizer_json.decode()), eos_token="<|im_end|>"
    )
    fast.save_pretrained(folder)
    return folder, fast


def test_an_evaluation_by_log_likelihoods(server: Serve, tokenizer: Any, tmp_path: Path) -> None:
    python, (folder, fast) = foreign_python(), tokenizer
    questions = _questions()
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "headrace_choices.yaml").write_text(TASK.replace("DATA", str(data)))
    address = f"model=smollm2,base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=4,seed=1"
    command = [str(python), "-m", "lm_eval", "--model", "local-completions", "--model_args", address]
    command += ["--tasks", "headrace_choices", "--include_path", str(tmp_path), "--log_samples"]
    command += ["--output_path", str(tmp_path / "out")]
    # Its tokenizer needs transformers, which is here already.
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib"), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    (results,) = (tmp_path / "out").rglob("results_*.json")
    plain, right = PlainModel(), 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        question = sample["doc"]
        expected = []
        for choice in question["choices"]:
            context = fast(question["question"], add_special_tokens=False).input_ids
            whole = fast(f"{question['question']} {choice}", add_special_tokens=False).input_ids
            logprobs = plain.logprobs(whole)
            expected.append(sum(float(logprobs[row - 1, whole[row]]) for row in range(len(context), len(whole))))
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(expected, abs=5e-3), question
        right += expected.index(max(expected)) == question["answer"]
    accuracy = json.loads(results.read_text())["results"]["headrace_choices"]["acc,none"]
    print(f"{right} of {len(questions)} right")
    assert len(questions) >= 24 and accuracy == pytest.approx(right / len(questions))


def test_typed_answers_by_instructor(server: Serve) -> None:
    command = [str(foreign_python()), "-c", INSTRUCTOR, f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "name=" in done.stdout
