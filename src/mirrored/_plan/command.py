"""`mirrored plan --topology NAME train.py`: runs a training program for devices that are not here, and prints its plan."""

from __future__ import annotations

import argparse
import logging
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .. import _env, _process
from .._errors import PlanError
from .plan import plan_of
from .topologies import topology

_NOTHING = "mirrored plan: the program has compiled nothing for these devices. "
_NO_STRATEGY = "A strategy that names its devices gets those: write mr.MirroredStrategy() or mr.MultiWorkerMirroredStrategy()."
_NO_STEP = "It ended before strategy.run, or a function of mr.function, was called."


def main(argv: Sequence[str]) -> int:
    """Plan a program; return 0 if everything that it compiles fits, else 1."""
    parser = argparse.ArgumentParser(
        "mirrored plan", description="Compile a training program for machines that are not here: does it fit, what does it "
        "send, how well does it scale? The program is unchanged: strategies that name no devices get those of the topology.",
    )  # fmt: skip
    parser.add_argument("--topology", required=True, metavar="NAME", help="such as v5e:16x16, v5p:8x8x4, h100:32x8")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="end when one program was called so often (100)")
    parser.add_argument("script", help="the training program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        right = "mirrored plan --topology v5e:16x16 train.py"
        parser.exit(2, f"mirrored plan: there is no file {options.script!r}. Write for example: {right}\n")
    _env.JAX_PLATFORMS.set_default("cpu")  # a plan needs no accelerator
    _show_progress()
    try:
        _process.topology = tuple(topology(options.topology))
    except PlanError as error:
        parser.exit(2, f"mirrored plan: {error}\n")
    _process.max_planned_calls = options.steps
    code = _run(options.script, options.args)
    plans = [plan for plan in map(plan_of, _process.planned_meshes) if plan.programs]
    if not plans:
        sys.stderr.write(f"{_NOTHING}{_NO_STEP if _process.planned_meshes else _NO_STRATEGY}\n")
    for plan in plans:
        print(plan)
    return code or int(not plans or not all(plan.fits(program) for plan in plans for program in plan.programs))


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
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).resolve() == path]
        where = f"{script}:{lines[-1]}: " if lines else ""
        sys.stderr.write(f"mirrored plan: {where}{str(error).partition('. ')[0].rstrip('.')}.\n")
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0
