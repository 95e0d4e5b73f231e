"""One rank's part of a model, sharded from outside by a plan: tensor, expert and pipeline parallelism.

The plan comes from the model's own strings (`strings.py`); sizes of parts are plain numbers (`cuts.py`, `places.py`,
without torch); `shard` shrinks the modules before the weights are read, `Sharding.connect` adds the communication after
surgery.
"""
