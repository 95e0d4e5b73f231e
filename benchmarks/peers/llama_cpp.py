"""llama.cpp in its own environment: `pip install llama-cpp-python` compiles it for this CPU.

    PYTHON llama_cpp.py FILE.gguf THREADS

Writes a line "ready" once the model is loaded; then reads lines {"prompts": [[token ids]], "tokens": to generate of
each}, and answers each with {"seconds": s}. Prompts run one after another: the package batches no requests.
"""

import json
import sys
import time

sys.path.pop(0)  # this file has the package's name

from llama_cpp import Llama

threads = int(sys.argv[2])
model = Llama(sys.argv[1], n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    began = time.perf_counter()
    for prompt in work["prompts"]:
        model.reset()
        model.eval(prompt)
        for _ in range(work["tokens"] - 1):
            model.eval([model.sample(temp=0.0)])
        model.sample(temp=0.0)
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
