"""vLLM on a CPU in its own environment.

    PYTHON vllm_cpu.py FOLDER THREADS [DTYPE]

FOLDER: a model for transformers. Reads and answers lines as llama_cpp.py does.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("OMP_NUM_THREADS", sys.argv[2])

from vllm import LLM, SamplingParams


def main() -> None:
    model = LLM(
        sys.argv[1], dtype=sys.argv[3] if len(sys.argv) > 3 else "float32", max_model_len=2048,
        enable_prefix_caching=False, max_num_seqs=32, disable_log_stats=True,
    )  # fmt: skip
    print("ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=work["tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        began = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":  # its engine is a process that imports this file
    main()
