"""Small damages to the source, each with the test that catches it: `make mutants`. A test goes only if they are still caught.

Kept by hand are some for the promises that matter most: no silent wrong number, no lost record, no hang; for the lines of a
change `make mutations` makes them. Those of a wing are in `tests/<wing>/mutants.py`. Each is the file under `src/mirrored`, a
text that is there once, what takes its place, and the test that must fail then.

Usage: python tests/mutants.py [--of WORD] [--sample N] [--seed N] [--jobs N]
"""

import argparse
import contextlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "mirrored"
#: Of pytest: a test failed. Anything else (no such test, an error at import) says nothing of the test.
CAUGHT, BROKEN = 1, 99


class Mutant(NamedTuple):
    """A file with one small damage, and the test that catches it."""

    file: str
    old: str
    new: str
    test: str
    where: str = ""


def mutants() -> list[Mutant]:
    """Return all of them, wing by wing."""
    found = []
    for path in sorted(TESTS.rglob("*/mutants.py")):
        spec = importlib.util.spec_from_file_location(f"mutants_of_{path.parent.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.MUTANTS
    return [Mutant(*one) for one in found]


@contextlib.contextmanager
def damaged(mutant: Mutant) -> Iterator[Path]:
    """Make a folder with a damaged copy of the package."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SOURCE, folder / "mirrored", ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / "mirrored" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.old!r} is {text.count(mutant.old)} times in {mutant.file}"
        path.write_text(text.replace(mutant.old, mutant.new))
        yield folder


def run_test(test: str, folder: Path) -> NoReturn:
    """Run a test with the package in this folder, in a process that was forked for it."""
    code = BROKEN
    try:
        log = os.open(folder / "log", os.O_RDWR | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update({"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"})
        sys.path.insert(0, str(folder))
        warnings.resetwarnings()
        code = int(pytest.main(["-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", test]))
        assert sys.modules["mirrored"].__file__.startswith(str(folder))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = BROKEN
    finally:
        os._exit(code)


def missed(chosen: list[Mutant], num_jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Run the tests, each in a fork of this process, which has imported all but the package; yield what was not caught."""
    for name in ("grain", "jax", "optax"):  # not hypothesis: pytest rewrites its plugins as they are imported
        importlib.import_module(name)
    warnings.simplefilter("ignore")  # JAX warns of forks; here it has not started
    os.chdir(TESTS.parent)
    waiting, running = chosen[::-1], {}
    with contextlib.ExitStack() as folders:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                mutant = waiting.pop()
                folder = folders.enter_context(damaged(mutant))
                sys.stdout.flush()
                child = os.fork()
                if not child:
                    run_test(mutant.test, folder)
                running[child] = mutant, folder / "log"
            child, status = os.wait()
            mutant, log = running.pop(child)
            code = os.waitstatus_to_exitcode(status)
            if code != CAUGHT:
                said = log.read_text(errors="replace")[-1200:]
                yield mutant, "SURVIVED" if code == 0 else f"pytest ended with {code}: {said}"


def uncollected() -> list[str]:
    """List the tests of all mutants that pytest does not find: a case of another name says nothing of a damage."""
    named = {mutant.test for mutant in mutants()}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "slow or not slow", "-p", "no:cacheprovider", *files]
    lines = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False).stdout.splitlines()
    found = {*lines, *(line.partition("[")[0] for line in lines), *files}
    return sorted(named - found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", default="", help="only those whose file or test has this in its path")
    parser.add_argument("--sample", type=int, help="so many, drawn by chance")
    parser.add_argument("--seed", type=int, help="draw the same in each run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if missing := uncollected():
        print("no such test:", *missing, sep="\n  ")
        return 1
    chosen = [mutant for mutant in mutants() if options.of in f"{mutant.file} {mutant.test}"]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    num_missed = 0
    for num_missed, (mutant, what) in enumerate(missed(chosen, options.jobs), 1):  # noqa: B007
        print(f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}\n  {mutant.test}\n  {what}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} mutants were caught", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
