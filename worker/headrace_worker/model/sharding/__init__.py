"""One rank's part of a model, cut out from outside by a plan: tensor, expert and pipeline parallelism.

The plan comes from the model's own strings (`strings.py`); sizes of parts are plain numbers (`cuts.py`); `shard`
shrinks the modules before the weights are read, `Sharding.connect` adds the communication after surgery.
"""

from headrace_worker.model.sharding.shard import Sharding, kv_span, local_kv_heads, local_layers, shard

__all__ = ["Sharding", "kv_span", "local_kv_heads", "local_layers", "shard"]
