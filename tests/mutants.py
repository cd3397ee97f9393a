"""Small damages to the source, each with the test that catches it: `make mutants`. A test goes only if they are still caught.

The damages to a wing are in its folder, in `tests/<wing>/mutants.py`; those to single files are here. Each is the file under
`src/mirrored`, a text that is there once, what takes its place, and the test that must fail then.

Usage: python tests/mutants.py [--of WORD] [--sample N] [--jobs N]
"""

import argparse
import concurrent.futures
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "mirrored"
#: Of pytest: a test failed. Anything else (no such test, an error at import) says nothing of the test.
CAUGHT = 1


class Mutant(NamedTuple):
    """A file with one small damage, and the test that catches it."""

    file: str
    old: str
    new: str
    test: str


#: The damages to files that are no wings.
MUTANTS: list[tuple[str, str, str, str]] = []


def mutants() -> list[Mutant]:
    """Return all of them, wing by wing."""
    found = list(MUTANTS)
    for path in sorted(TESTS.rglob("*/mutants.py")):
        spec = importlib.util.spec_from_file_location(f"mutants_of_{path.parent.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.MUTANTS
    return [Mutant(*one) for one in found]


def outcome(mutant: Mutant) -> str:
    """Damage a copy of the source, run the test with it, and return "caught", or what happened instead."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "mirrored"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"the text to damage is there {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", mutant.test]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == CAUGHT:
        return "caught"
    return (
        "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", default="", help="only those of files whose path has this in it")
    parser.add_argument("--sample", type=int, help="so many, drawn anew in each run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if options.of in mutant.file]
    if options.sample is not None:
        chosen = random.sample(chosen, min(options.sample, len(chosen)))
    num_missed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for mutant, result in zip(chosen, pool.map(outcome, chosen), strict=True):
            if result != "caught":
                num_missed += 1
                print(f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}\n  {mutant.test}\n  {result}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} mutants were caught", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
