"""Creates the description of a replica from its assembly."""

from blake3 import blake3
from google.protobuf.json_format import ParseDict

from headrace_proto import replica_pb2 as pb
from headrace_worker.assembly.assemble import Assembly
from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.layout import LAYOUT_VERSION, CacheLayout
from headrace_worker.server.description import Description


def describe(assembly: Assembly, config: ReplicaConfig, boot_id: bytes, cache_key: bytes) -> Description:
    """The description for routers. `cache_key`: of the block hash."""
    model, limits = assembly.model, assembly.limits
    facts = model.facts
    identity = pb.ReplicaIdentity(
        replica_id=config.replica_id,
        generation=config.generation,
        boot_id=boot_id,
        model=config.model,
        revision=model.source.revision,
        dtype=model.arithmetic,  # as in the block hashes of its engine
        kv_dtype=model.kv_dtype_name,
        kv_layout=_layout_message(model.layout, assembly.size.state_slots > 1),
        role=config.role.number,
    )
    message = pb.ModelFacts(
        identity=identity,
        max_model_len=assembly.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        bos_token_id=facts.bos_token_id,
        chat_template=facts.chat_template,
        named_templates=facts.named_templates,
        special_tokens=facts.special_tokens,
        tokenizer_digest=blake3(facts.tokenizer_json).digest(),
        tokenizer_size=len(facts.tokenizer_json),
        defaults=ParseDict(facts.defaults, pb.GenerationDefaults()),
        add_bos=facts.add_bos,
        kv_blocks=assembly.size.num_blocks - 1,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        cache_key=cache_key,
    )
    return Description(message, facts.tokenizer_json)


def _layout_message(layout: CacheLayout, states: bool) -> pb.KvLayout:
    groups = [
        pb.CacheGroup(
            index=group.index,
            num_layers=len(group.layers),
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            window=group.window,
        )
        for group in layout.groups
    ]
    if states:
        layers = len({state.layer for state in layout.states})
        groups.append(pb.CacheGroup(index=len(groups), num_layers=layers, window=2, state=True))
    return pb.KvLayout(version=LAYOUT_VERSION, block_size=layout.block_size, groups=groups)
