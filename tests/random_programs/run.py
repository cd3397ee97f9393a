"""`make programs NUM=3000 SEED=0`: random programs in several ways, each compared with one device."""

import argparse
import collections
import gc
import math
import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
CHUNK = 5
#: So many programs share processes, which grow; `max_tasks_per_child` of an executor hangs (CPython's issue 115634).
PER_POOL = 400
#: Of a hundred programs that run on one device, so many may be refused.
MAX_REFUSED = 2


def start() -> None:
    """Set up a process: compiling is what counts."""
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    cache = Path(__file__).parents[2] / ".pytest_cache" / "jax" / str(sys.implementation.cache_tag)  # as in conftest
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_parallel_codegen_split_count=1"
    import mirrored as mr

    mr.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    import random_programs.harness  # noqa: F401

    gc.freeze()
    gc.disable()  # a collection for each chunk of programs is enough, of what is new


def chunk(seeds: list[int], until: float, one_compiled_of: int) -> list[Any]:
    """Check programs, as many as begin before a time."""
    import jax
    from random_programs.harness import check

    outcomes = [outcome for seed in seeds if time.time() < until for outcome in check(seed, one_compiled_of)]
    if seeds[0] % (20 * CHUNK) == 0:
        jax.clear_caches()
    gc.collect()
    gc.freeze()
    return outcomes


def cause(words: str) -> str:
    """Return a message without what differs by program."""
    return re.sub(r"<program \d+>:\d+|'\w+'|`[^`]*`|\(?[\d,. \[\]()]+\)?", "_", words)[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more programs after so many")
    parser.add_argument("--compile", type=int, default=20, metavar="N", help="let XLA compile one of N programs")
    parser.add_argument("--show", action="store_true", help="print the text of each program and how it ends")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.num)
    began, outcomes = time.monotonic(), []
    until = time.time() + args.seconds
    if args.show:
        start()
        from random_programs.grammar import Program

        for seed in seeds:
            print(Program(seed).text)
            print(*chunk([seed], math.inf, args.compile), sep="\n", flush=True)
        return 0
    context = multiprocessing.get_context("spawn")
    causes = set[str]()
    for first in range(0, len(seeds), PER_POOL):
        block = seeds[first : first + PER_POOL]
        chunks = [list(block[i : i + CHUNK]) for i in range(0, len(block), CHUNK)]
        with ProcessPoolExecutor(args.jobs, context, start) as pool:
            futures = [pool.submit(chunk, each, until, args.compile) for each in chunks]
            for future in as_completed(futures):
                outcomes += future.result()
                for seed, way, outcome in future.result():
                    is_new = outcome.kind != "refused" or cause(outcome.words) not in causes
                    if outcome.kind != "ok" and is_new:
                        print(f"{outcome.kind}: seed {seed}, {way}: {outcome.words}", flush=True)
                        causes.add(cause(outcome.words))
        print(f"{len({seed for seed, *_ in outcomes})} programs in {time.monotonic() - began:.0f} s", flush=True)
        if time.time() >= until:
            break
    return report(outcomes, time.monotonic() - began)


def report(outcomes: list[Any], seconds: float) -> int:
    """Print the counts; return the exit code."""
    counts = collections.Counter(outcome.kind for _, _, outcome in outcomes)
    programs = {seed for seed, _, _ in outcomes}
    if not programs:
        print("no program has begun")
        return 1
    refused = collections.defaultdict(list)
    for seed, way, outcome in outcomes:
        if outcome.kind == "refused":
            refused[cause(outcome.words)].append((seed, way, outcome.words))
    for examples in sorted(refused.values(), key=len, reverse=True):
        seed, way, words = examples[0]
        print(f"refused {len(examples)} times, first: seed {seed}, {way}: {words}")
    num_refused = len({seed for seed, _, outcome in outcomes if outcome.kind == "refused"})
    print(f"{len(programs)} programs in {seconds:.0f} s, in {len(outcomes) / len(programs):.1f} ways each: {dict(counts)}")
    print(f"{num_refused} of them refused in a way")
    wrong = {(seed, way) for seed, way, outcome in outcomes if outcome.kind not in ("ok", "refused")}
    if wrong:
        print(f"see one: {Path(__file__).name} --show --num 1 --seed {min(wrong)[0]}")
    return int(bool(wrong) or 100 * num_refused > MAX_REFUSED * max(100, len(programs)))  # of a few programs one may be refused


if __name__ == "__main__":
    sys.exit(main())
