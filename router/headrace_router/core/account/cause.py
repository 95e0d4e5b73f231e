"""What the time of a request is spent on."""

from enum import StrEnum


class Cause(StrEnum):
    """The values are names in documents; `words` are for people."""

    ADMISSION = "admission"
    TOKENIZER = "tokenizer"
    PLACEMENT = "placement"
    QUEUE = "queue"
    FETCH = "fetch"
    PROMPT = "prompt"
    PROMPT_BESIDE = "prompt_beside"
    DECODE = "decode"
    SEQUENCES_BESIDE = "sequences_beside"
    PROMPTS_BESIDE = "prompts_beside"
    PREEMPTED = "preempted"
    SLOW_REPLICA = "slow_replica"
    MOVED = "moved"
    CLIENT = "client"
    OTHER_CHOICES = "other_choices"
    REST = "rest"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Cause.ADMISSION: "reading the body, and waiting for a place among this router's requests",
    Cause.TOKENIZER: "tokenizing the prompt",
    Cause.PLACEMENT: "waiting for a replica",
    Cause.QUEUE: "waiting in the replica's queue",
    Cause.FETCH: "waiting for KV blocks of another replica",
    Cause.PROMPT: "computing the part of the prompt that no cache had",
    Cause.PROMPT_BESIDE: "other work in the steps that computed the prompt",
    Cause.DECODE: "decoding",
    Cause.SEQUENCES_BESIDE: "other streams in the steps of the answer",
    Cause.PROMPTS_BESIDE: "prompts of others in the steps of the answer",
    Cause.PREEMPTED: "without KV memory: preempted, and computed again",
    Cause.SLOW_REPLICA: "a replica slower than its peers",
    Cause.MOVED: "moving to another replica",
    Cause.CLIENT: "waiting for the client to take the answer",
    Cause.OTHER_CHOICES: "other choices of the request",
    Cause.REST: "network, router, and what is not known",
}
