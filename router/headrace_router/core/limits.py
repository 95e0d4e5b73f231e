"""Limits of one connection, of one request, and of all requests together."""

from pydantic import BaseModel, ConfigDict, Field

from headrace_base.settings import flag


class Limits(BaseModel):
    """Checked before any work is done; part of the cluster spec. Sizes are bytes, times are seconds.

    docs/limits.md has the table.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    connections: int = Field(
        default=4096,
        ge=1,
        description="of HTTP that are open at a time, and as many of gRPC",
        json_schema_extra=flag("--max-connections"),
    )
    header_seconds: float = Field(
        default=10,
        gt=0,
        description="for a client to send a request's line and headers",
        json_schema_extra=flag("--header-seconds"),
    )
    body_seconds: float = Field(
        default=30, gt=0, description="for a client to send its body", json_schema_extra=flag("--body-seconds")
    )
    write_seconds: float = Field(
        default=30,
        gt=0,
        description="for a client to read about 64 KiB of an answer that waits (gRPC: the next event)",
        json_schema_extra=flag("--write-seconds"),
    )
    idle_seconds: float = Field(
        default=75,
        gt=0,
        description="that a connection stays open between requests",
        json_schema_extra=flag("--idle-seconds"),
    )
    streams_per_connection: int = Field(default=256, ge=1, description="gRPC calls of one connection at a time")
    header_bytes: int = Field(
        default=32 << 10, ge=1024, description="of one request's line and headers, and of its trailers"
    )
    body_bytes: int = Field(default=4 << 20, ge=1024, description="of one request body")
    json_depth: int = Field(default=32, ge=4, le=1000, description="of nested objects and arrays")
    messages: int = Field(default=2048, ge=1, description="of one chat")
    content_parts: int = Field(default=4096, ge=1, description="of all messages of one chat")
    prompts: int = Field(default=128, ge=1, description="of one completion request")
    prompt_chars: int = Field(default=1_000_000, ge=1, description="of all prompts of a request, before tokenizing")
    prompt_tokens: int | None = Field(
        default=None, ge=1, description="of one prompt; none = what the model's context holds"
    )
    choices: int = Field(default=128, ge=1, description="n x prompts of one request")
    output_tokens: int = Field(default=1 << 20, ge=1, description="choices x max_tokens of one request")
    logprob_entries: int = Field(
        default=1 << 18, ge=1, description="choices x max_tokens x (1 + top_logprobs) of a request with logprobs"
    )
    stop_strings: int = Field(default=16, ge=1)
    stop_bytes: int = Field(default=1024, ge=1, description="of one stop string")
    stop_token_ids: int = Field(default=128, ge=1)
    logit_bias_entries: int = Field(default=1024, ge=1)
    bad_words: int = Field(default=128, ge=1)
    bad_word_bytes: int = Field(default=256, ge=1, description="of one of them")
    bad_word_tokens: int = Field(default=2048, ge=1, description="of all of them, each alone and after a space")
    allowed_token_ids: int = Field(default=4096, ge=1)
    top_logprobs: int = Field(default=20, ge=0)
    grammar_bytes: int = Field(
        default=64 << 10, ge=256, description="of a schema, pattern, list of choices or grammar of one request"
    )
    grammar_seconds: float = Field(default=0.4, gt=0, description="for compiling such a grammar")
    metadata_entries: int = Field(default=16, ge=0)
    label_bytes: int = Field(default=512, ge=1, description="of user, safety_identifier and metadata strings")
    max_concurrent_requests: int = Field(
        default=1024, ge=1, description="choices that run at a time; more wait in the queue"
    )
    max_queued_requests: int = Field(default=1024, ge=0, description="that wait; more are refused with 503")
    max_concurrent_per_key: int | None = Field(
        default=None, ge=1, description="of one API key; more are refused with 429"
    )
    queue_seconds: float = Field(default=30, gt=0, description="that a request waits at the router before 503")
    tokenize_seconds: float = Field(default=10, gt=0, description="to render and tokenize one request")
    tokenize_threads: int = Field(default=2, ge=1)
    tokenize_queue: int = Field(default=1024, ge=1, description="requests that wait for a tokenizer thread")
    request_seconds: float | None = Field(
        default=None, gt=0, description="deadline of a whole request; none = no deadline"
    )
