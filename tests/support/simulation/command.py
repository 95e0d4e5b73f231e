"""The command line of schedules: one seed with its events, or many without."""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable

import structlog


def replay(run: Callable[[int, bool, bool], Counter[str]], description: str | None, variant: str = "") -> None:
    """Replays seeds of `run`, whose arguments are a seed, the variant, and whether to print events.

    variant: the name of a flag for schedules of another kind.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("seed", type=int)
    parser.add_argument("--until", type=int, help="run all seeds up to this one, without a trace")
    if variant:
        parser.add_argument(f"--{variant}", action="store_true", help="schedules of this kind")
    options = parser.parse_args()
    chosen = bool(variant) and bool(getattr(options, variant))
    if options.until is None:
        print(run(options.seed, chosen, True))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    total: Counter[str] = Counter()
    failed, began = 0, time.process_time()
    for seed in range(options.seed, options.until):
        try:
            total += run(seed, chosen, False)
        except Exception as error:
            failed += 1
            print(seed, type(error).__name__, str(error)[:300], flush=True)
    print(total, f"{time.process_time() - began:.1f} s, {failed} failed")
    sys.exit(failed > 0)
