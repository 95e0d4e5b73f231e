"""A replica's load as policies may use it: its numbers are possible, and its lists are bounded."""

from headrace_proto.replica_pb2 import Load

MAX_SOURCES = 256  # replicas from which it has fetched
MAX_STEP_MS = 1e8  # a day
MAX_UNIT_MS = 1e6  # per token, or sequence: products with any count of them stay finite
MAX_SECONDS = 1e12
_STEP_MODEL = {
    "base_ms": MAX_STEP_MS,
    "per_prefill_token_ms": MAX_UNIT_MS,
    "per_decode_sequence_ms": MAX_UNIT_MS,
    "per_kv_token_ms": MAX_UNIT_MS,
    "error_ms": MAX_STEP_MS,
}


def checked_load(load: Load) -> Load:
    """The load; numbers that cannot be are 0 then, which means that they are not known.

    A replica with a defect would otherwise make the predictions of all of its model's requests fail.
    """
    limits = (
        (load, {"kv_usage": 1.0, "predicted_step_ms": MAX_STEP_MS}),
        (load.counters, {"fetch_seconds": MAX_SECONDS}),
        (load.step_model, _STEP_MODEL),
        *[(source, {"per_token_ms": MAX_UNIT_MS}) for source in load.sources[:MAX_SOURCES]],
    )
    wrong = [
        (place, name)
        for place, (message, most) in enumerate(limits)
        for name, limit in most.items()
        if not 0 <= getattr(message, name) <= limit  # nor NaN
    ]
    if not wrong and len(load.sources) <= MAX_SOURCES:
        return load
    checked = Load()
    checked.CopyFrom(load)
    del checked.sources[MAX_SOURCES:]
    messages = (checked, checked.counters, checked.step_model, *checked.sources)
    for place, name in wrong:
        setattr(messages[place], name, 0.0)
    return checked
