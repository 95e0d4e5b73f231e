"""Seeds that failed once, and what each found. Always run."""

KEPT: dict[int, str] = {
    135: "a request cancelled between the end of its fetch and its queueing was queued all the same",
    198: "the same, with a fetch that failed",
    413: "a token drawn on top of a failed step was emitted",
    961: "the same at the end of an answer",
}
