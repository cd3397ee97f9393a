"""`mirrored plan --topology NAME train.py`: runs a training program for devices that are not here, and prints its plan."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .. import _process
from .._errors import PlanError
from .._options import Storage
from .plan import Plan, plan_of
from .topologies import topology
from .trials import Command, Trial, most_rows, plan_with, remedies

_NOTHING = "mirrored plan: the program has compiled nothing for these devices. "
_NO_STRATEGY = "A strategy that names its devices gets those: write mr.MirroredStrategy() or mr.MultiWorkerMirroredStrategy()."
_NO_STEP = "It ended before strategy.run, or a function of mr.function, was called."
_NO_ROWS = (
    "the rows of its batches cannot be changed: none comes from strategy.distribute_dataset. Change them in the script, and plan "
    "it again."
)


def main(argv: Sequence[str]) -> int:
    """Plan a program; return 0 if everything that it compiles fits, else 1."""
    parser = argparse.ArgumentParser(
        "mirrored plan", description="Compile a training program for machines that are not here: does it fit, what does it "
        "send, how well does it scale? If it does not fit, what would? The program is unchanged: strategies that name no devices "
        "get those of the topology. Memory, operations and bytes sent are those of the compiled program; times are estimates.",
    )  # fmt: skip
    parser.add_argument("--topology", required=True, metavar="NAME", help="such as v5e:16x16, v5p:8x8x4, h100:32x8")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="end when one program was called so often (100)")
    parser.add_argument("--find-batch", action="store_true", help="find how many rows of a batch fit on each replica")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="plan with N rows on each replica in every batch")
    parser.add_argument("--parts", type=int, default=1, metavar="N", help="plan with each device's rows in N parts, one by one")
    parser.add_argument("--shard-state", action="store_true", help="plan with shard_state=True in each mr.Optimizer")
    stored = [kind.value.lower() for kind in Storage]
    parser.add_argument("--storage", choices=stored, help="plan with this storage in each strategy")
    parser.add_argument("--trial", help=argparse.SUPPRESS)  # the file for what `plan_with` reads
    parser.add_argument("script", help="the training program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        right = "mirrored plan --topology v5e:16x16 train.py"
        parser.exit(2, f"mirrored plan: there is no file {options.script!r}. Write for example: {right}\n")
    _show_progress()
    try:
        _process.topology = tuple(topology(options.topology))
    except PlanError as error:
        parser.exit(2, f"mirrored plan: {error}\n")
    script = [options.script, *options.args]
    command = Command(argv[: len(argv) - len(script)], script)
    if options.find_batch and not options.trial:
        return _find_batch(command)
    _process.max_planned_calls = options.steps
    storage = options.storage and Storage.parse(options.storage, "--storage")
    _process.what_if = _process.WhatIf(options.rows, options.parts, options.shard_state, storage)
    code = _run(options.script, options.args)
    plans = [plan for plan in map(plan_of, _process.planned_meshes) if plan.programs]
    if not plans:
        why = _NO_STEP if _process.planned_meshes else _NO_STRATEGY
        sys.stderr.write(f"{_NOTHING}{why}\n")
        return code or 1
    trial = _trial_of(plans)
    if options.trial and not code:
        Path(options.trial).write_text(json.dumps(dataclasses.asdict(trial)))
    print(trial.text, flush=True)
    if not trial.fits and not options.trial:
        print("\ntrying what fits:")
        for line in remedies(command, trial):
            print(f"  {line}", flush=True)
    return code or int(not trial.fits)


def _trial_of(plans: Sequence[Plan]) -> Trial:
    pairs = [(plan, program) for plan in plans for program in plan.programs]
    plan, largest = min(pairs, key=lambda pair: (pair[0].fits(pair[1]), -pair[1].memory.peak))
    rows = _process.what_if.rows or _process.what_if.given_rows
    arguments = [list(program.arguments) for _, program in pairs]
    return Trial(plan.fits(largest), plan._needs(largest), rows, plan.replicas, arguments, "\n".join(map(str, plans)))


def _find_batch(command: Command) -> int:
    """Print how many rows fit on each replica, and the plan with as many."""
    if (first := plan_with(command)) is None:
        return 1
    trials = {first.rows: first}

    def fits_with(rows: int) -> bool:
        trial = trials.get(rows) or plan_with(command, "--rows", rows)
        if trial is None or (trial is not first and trial.arguments == first.arguments):
            raise PlanError(_NO_ROWS)
        trials[rows] = trial
        sys.stderr.write(f"mirrored plan: with {rows} rows on each replica {trial.verdict}\n")
        return trial.fits

    try:
        if not first.rows:
            raise PlanError(_NO_ROWS)
        most, too_many = most_rows(fits_with, first.rows)
    except PlanError as error:
        sys.stderr.write(f"mirrored plan: {error}\n")
        return 1
    if not most:
        print(f"does not fit: with 1 row on each replica {trials[1].verdict}")
        return 1
    rest = f", {too_many} do not" if too_many else ""
    print(f"{most} rows fit on each replica, a batch of {most * first.replicas}{rest}\n\n{trials[most].text}")
    return 0


def _show_progress() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("mirrored plan: %(message)s"))
    logger = logging.getLogger("mirrored")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _run(script: str, args: Sequence[str]) -> int:
    """Run a script like `python script args`, until it reads a value; return its exit code."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except PlanError as error:
        path = Path(script).resolve()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        where = f"{script}:{lines[-1]}: " if lines else ""
        sys.stderr.write(f"mirrored plan: {where}{str(error).partition('. ')[0].rstrip('.')}.\n")
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0
