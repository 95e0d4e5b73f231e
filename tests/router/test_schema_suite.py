"""The JSON-Schema-Test-Suite: a schema is refused, or its constraint allows no instance that it does not allow."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from headrace_proto.grammar import GrammarError, compile_grammar, grammar_tokenizer
from headrace_router.answer.grammar import schema_grammar
from headrace_worker.model.gguf_tokenizer import byte_tokenizer

VERSION = "4.26.0"  # of jsonschema, whose source distribution contains the suite
DRAFT = f"jsonschema-{VERSION}/json/tests/draft2020-12/"
TOKENIZER = byte_tokenizer(300)
END = 2


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The suite's groups of required tests: a schema each, and instances that are valid or not."""
    folder = tmp_path_factory.mktemp("suite")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run([*download, f"jsonschema=={VERSION}", "-d", str(folder)], timeout=300, check=False)
    if done.returncode:
        pytest.skip("the suite is missing: it comes with the source of jsonschema, from the package index")
    found: list[dict[str, Any]] = []
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for name in sorted(archive.getnames()):
            inner = name.removeprefix(DRAFT)
            if name.startswith(DRAFT) and inner.endswith(".json") and "/" not in inner:
                file = archive.extractfile(name)
                assert file is not None
                found += json.load(file)
    return found


def _allowed(compiled: Any, text: str) -> bool:
    """Whether the text may be a whole answer."""
    matcher = compiled.deep_copy()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_no_invalid_instance_is_allowed(groups: list[dict[str, Any]], tmp_path: Path) -> None:
    tokenizer = grammar_tokenizer(TOKENIZER.to_str(), 300, [END])
    compiled, wrong, valid, allowed = 0, [], 0, 0
    for group in groups:
        try:
            grammar = compile_grammar(tokenizer, schema_grammar(group["schema"]))
        except (GrammarError, ValueError):
            continue
        compiled += 1
        for test in group["tests"]:
            forms = {
                json.dumps(test["data"], ensure_ascii=False, separators=pair) for pair in ((",", ":"), (", ", ": "))
            }
            accepted = any(_allowed(grammar, form) for form in forms)
            if test["valid"]:
                valid += 1
                allowed += accepted
            elif accepted:
                wrong.append(f"{group['description']}: {test['description']}")
    print(f"{compiled} of {len(groups)} schemas compiled; {allowed} of {valid} valid instances allowed; wrong: {wrong}")
    assert len(groups) >= 368 and compiled >= 160
    assert not wrong
