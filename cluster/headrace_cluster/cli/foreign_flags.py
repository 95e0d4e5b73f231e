"""Flags of other servers and routers and their equivalents here, which the error message names."""

from collections.abc import Sequence

from headrace_cluster.errors import SpecError

COMMANDS = ("serve", "controller", "router", "config")

_MODEL = "the model is an argument without a flag: headrace serve MODEL"
_BYTES = "here the KV cache has a size in bytes, such as --kv-cache-memory 20GiB"
_ALWAYS = "this is always on; leave it out"
_OF_MODEL = "it comes with the model; leave it out"
_PLACED = "placement has no weights and follows the KV caches by itself; leave it out"
_SESSIONS = "--policy session, with the id in the header that --session-header names"

# By name: our flag, or a sentence if there is none.
_NAMES = {
    ("--tensor-parallel-size", "-tp", "--tp-size"): "--tp",
    ("--pipeline-parallel-size", "-pp", "--pp-size"): "--pp",
    ("--data-parallel-size", "-dp", "--dp-size", "--dp"): "--replicas",
    ("--enable-expert-parallel", "--expert-parallel-size", "--ep-size"): "--ep",
    ("--gpu-memory-utilization", "--mem-fraction-static", "--max-total-tokens"): _BYTES,
    ("--kv-cache-memory-bytes",): "--kv-cache-memory",
    ("--context-length", "--ctx-size", "-c"): "--max-model-len",
    ("--max-running-requests", "--parallel", "-np"): "--max-num-seqs",
    ("--chunked-prefill-size", "--batch-size", "-b"): "--max-num-batched-tokens",
    ("--page-size",): "--block-size",
    ("--model", "--model-path", "-m", "--hf-repo", "-hf"): _MODEL,
    ("--num-gpus", "--gpus"): "GPUs are --replicas times --tp times --pp",
    ("--alias", "-a"): "--served-model-name",
    ("--threads", "-t"): "--cpu-threads",
    ("--n-gpu-layers", "--gpu-layers", "-ngl"): "all layers are on one device: --device cuda or --device cpu",
    ("--api-key",): "--api-keys-file FILE, or the variable HEADRACE_API_KEYS",
    ("--enforce-eager", "--disable-cuda-graph"): "--cuda-graphs off",
    ("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-metrics", "--cont-batching", "-cb"): _ALWAYS,
    ("--no-enable-prefix-caching", "--disable-radix-cache"): "the prefix cache is always on",
    ("--no-enable-chunked-prefill",): "prompts are always computed in chunks: --max-num-batched-tokens bounds a step",
    ("--tokenizer", "--tokenizer-path", "--tokenizer-mode"): _OF_MODEL,
    ("--chat-template-file",): "--chat-template FILE",
    ("--seed", "--random-seed", "-s"): "a request brings its own seed; leave it out",
    (
        "-q",
    ): "--quantization fp8 or int8, of an unquantized checkpoint; the format of another is read from its config.json",
    ("--swap-space", "--cpu-offload-gb"): "running requests and the weights are on the device; leave it out",
    ("--kv-offloading-size", "--kv-offloading-backend", "--hicache-size", "--hicache-ratio"): (
        "evicted KV blocks go to host memory with --kv-offload-memory 8GiB"
    ),
    ("--enable-hierarchical-cache",): "--kv-offload-memory 8GiB",
    ("--hicache-storage-backend",): "--kv-offload-dir FOLDER, with --kv-offload-memory",
    ("--max-logprobs",): "the key limits.top_logprobs of the config file bounds it",
    ("--scheduling-policy", "--schedule-policy"): "requests run in the order of their arrival; leave it out",
    ("--disable-log-requests", "--enable-log-requests", "--log-requests"): "requests are not logged; leave it out",
    ("--enable-lora", "--lora-modules", "--lora-paths", "--lora"): "LoRA adapters are not supported",
    ("--download-dir",): "the variable HF_HOME names the folder for downloads",
    ("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"): "--kv-cache-dtype fp8 or int8, of keys and values",
    ("--disaggregation-mode", "--pd-disaggregation"): "--prefill N --decode M",
    ("--kv-transfer-config", "--disaggregation-transfer-backend"): (
        "KV blocks move by NIXL between all replicas; leave it out, or --kv-transfer BACKEND[:DEVICES] (pools: "
        "--prefill N --decode M)"
    ),
    ("--router-mode", "--routing-logic", "--router-policy", "--load-balance-method"): "--policy",
    ("--router-kv-overlap-score-weight", "--kv-overlap-score-weight", "--router-temperature"): _PLACED,
    ("--cache-threshold", "--balance-abs-threshold", "--balance-rel-threshold"): _PLACED,
    ("--kv-events-config", "--request-router-class", "--router-use-kv-events"): _PLACED,
    ("--session-key",): _SESSIONS,
    ("--mamba-ssm-cache-dtype", "--mamba-ssm-dtype"): "recurrent states are kept in float32; leave it out",
    ("--mamba-cache-mode", "--enable-mamba-cache-stochastic-rounding"): _ALWAYS,
    ("--max-mamba-cache-size", "--mamba-full-memory-ratio"): "--state-snapshots N",
    ("--language-model-only", "--limit-mm-per-prompt", "--mmproj", "-mm"): (
        "of a checkpoint with images the language model alone is served; leave it out"
    ),
}
FLAGS = {name: here for names, here in _NAMES.items() for name in names}


def check_flags(arguments: Sequence[str]) -> None:
    """Raises SpecError for the first flag of another server in a command line that starts a server."""
    if not arguments or arguments[0] not in COMMANDS:
        return
    for argument in arguments[1:]:
        given = argument.partition("=")[0]
        here = FLAGS.get(given.replace("_", "-") if given.startswith("--") else given)
        if here is not None:
            raise SpecError(f"no such option {given}; {f'here it is {here}' if here.startswith('--') else here}")
