"""Small damages to the source, each with the test that catches it: `make mutants`. A test goes only if they are still caught.

The damages to a wing are in its folder, in `tests/<wing>/mutants.py`; those to single files are here. Each is the file under
`src/mirrored`, a text that is there once, what takes its place, and the test that must fail then.

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


#: The damages to files that are no wings.
MUTANTS: list[tuple[str, str, str, str]] = [
    ("optimizer.py", "        self._iterations.assign_add(1)\n", "",
     "tests/test_optimizer.py::test_iterations_count_the_updates_wherever_they_are_made"),
    ("optimizer.py", 'self.variables if var_list is None else trainable(var_list)', 'self.variables',
     "tests/test_optimizer.py::test_minimize_some_of_the_variables"),
    ("_errors.py", "_thing.__name__.lower()", "_thing.__name__",
     "tests/test_troubleshooting.py::test_errors_say_where_their_page_is"),
    ("_errors.py", '__module__ = "mirrored"  #', '__module__ = __name__  #',
     "tests/test_public.py::test_errors_are_shown_under_the_name_to_catch"),
    ("__init__.py", "{*globals(), *_load()}", "globals()",
     "tests/test_public.py::test_importing_wakes_no_backend_and_loads_no_optional_package"),
    ("__init__.py", 'if name == "__all__":', "if False:",
     "tests/test_public.py::test_all_public_names_are_there_whoever_asks_first"),
    ("_text.py", "import itertools\n", "import itertools\n\nimport numpy\n",
     "tests/_command/test_group.py::test_workers_are_started_before_jax_could_be_imported"),
    ("losses.py", "call it in the function given to strategy.run.", "call it in a step.",
     "tests/test_troubleshooting.py::test_a_message_is_on_the_page_as_it_is_printed[loss_outside]"),
    ("_libraries.py", "values = [value, *value.values()]", "pass",
     "tests/test_libraries.py::test_the_library_and_the_lines_are_named_and_no_array_is_printed"),
    ("launch.py", "stream.reconfigure(errors=\"backslashreplace\")", "pass",
     "tests/_command/test_env.py::test_a_reader_that_leaves_and_characters_that_the_output_lacks_are_no_error_of_ours"),
    ("launch.py", "    except BrokenPipeError:\n", "    except ZeroDivisionError:\n",
     "tests/_command/test_env.py::test_a_reader_that_leaves_and_characters_that_the_output_lacks_are_no_error_of_ours"),
    ("launch.py", "    if None in (sys.stdout, sys.stderr):", "    if False:",
     "tests/_command/test_env.py::test_streams_that_are_closed_or_read_by_nobody_are_no_error_of_ours"),
    ("_text.py", " and not lines_for(value)", "", "tests/test_libraries.py::test_values_are_shown_shortly"),
    ("_tf_names.py", " or (instead.get(prefix) if name.startswith(prefix) else None)", "",
     "tests/test_tf_names.py::test_any_experimental_name_is_refused_and_the_known_ones_work_with_a_warning"),
]  # fmt: skip


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
    for name in ("grain", "jax", "optax", "orbax.checkpoint"):  # not hypothesis: pytest rewrites its plugins as they are imported
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
