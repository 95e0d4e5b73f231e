"""Answers of random weights at temperature 1 follow their schemas, however nasty these are."""

import asyncio
import json
from pathlib import Path

from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from headrace_proto import replica_pb2 as pb
from headrace_router.answer.grammar import schema_grammar
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish
from headrace_worker.offline import OfflineEngine, Prompt
from headrace_worker.server.description import Description
from headrace_worker.server.grammars import Grammars
from support.integration.tiny_llama import save_tiny_llama
from support.worker.schemas import bounded_schema

COUNT = 100


def test_a_hundred_schemas(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    config = ReplicaConfig(replica_id="r", model="m", source=str(folder), dtype="float32", device="cpu", cpu_threads=1)
    engine = OfflineEngine(config)
    facts = engine.assembly.model.facts
    message = pb.ModelFacts(vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
    grammars = Grammars(Description(message, facts.tokenizer_json))
    tokenizer = Tokenizer.from_str(facts.tokenizer_json.decode())
    schemas = [bounded_schema(seed, 1 + seed // 25) for seed in range(COUNT)]
    work = []
    for seed, schema in enumerate(schemas):
        guide = asyncio.run(grammars.compile(schema_grammar(schema)))
        work.append(Prompt([5, seed], 1500, RowSampling(temperature=1.0, seed=seed), guide=[guide].pop))
    ended = 0
    for schema, completion in zip(schemas, engine.generate(work), strict=True):
        assert not completion.error
        if completion.finish in (Finish.STOP, Finish.COMPLETE):
            Draft202012Validator(schema).validate(json.loads(tokenizer.decode(completion.token_ids)))
            ended += 1
    grammars.close()
    assert ended >= 95
