"""The benchmarks: the harness compares fairly, and every file runs and prints its table."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parameters import nightly
from processes import run_program

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    """The module that all benchmark files share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _harness

    return _harness


#: All but what they share.
FILES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if not re.match("_|peer_|run_all|tables", path.stem))
#: What takes long besides: of workloads and libraries one or two are enough. A Python without packages has no peers.
OPTIONS = {
    "step_time": ["--workloads=W1", "--peers-python=bare/bin/python"],
    "loop": ["--replicas=8"],
    "libraries": ["--only=Keras fit"],
    "models": ["--only=NNX"],
    "virtual_replicas": ["--workloads=W1"],
}
#: Of the slow suite: one that has peers and losses to compare, and one that has neither. The harness is the same in all.
QUICK = ("step_time", "transfers")
#: What imports jax is there already; a benchmark sees itself as its own program.
RUN = """
import os, runpy, sys
folder = sys.argv.pop(1)
del sys.argv[0]
os.chdir(folder)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", [*QUICK, *nightly(*(file for file in FILES if file not in QUICK))])
def test_quick_run_prints_its_table(file: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = [tmp_path, BENCHMARKS / f"{file}.py", "--quick", *OPTIONS.get(file, [])]
    ended = run_program(RUN, *command, env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}, timeout=280)
    assert ended.returncode == 0 and "| median" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_without_a_gpu_its_benchmark_says_so(tmp_path: Path) -> None:
    ended = run_program(RUN, tmp_path, BENCHMARKS / "gpu.py", timeout=60)
    assert ended.stdout.startswith("skipped: JAX has found no GPU") and ended.returncode == 0, ended.stderr


def test_run_all_runs_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run_all

    assert sorted(run_all.FILES) == FILES


@pytest.mark.parametrize("error, is_refused", [(0.0, False), (1e-6, False), (1e-2, True)])
def test_contenders_that_compute_other_losses_are_not_timed(harness, error: float, is_refused: bool) -> None:
    def contender(name: str, error: float):
        losses = itertools.count(1)
        return harness.Contender(name, lambda num_steps: next(losses) * (1 + error))

    contenders = [contender("by hand", 0.0), contender("ours", error)]
    if is_refused:
        with pytest.raises(AssertionError, match="ours computes other losses than by hand"):
            harness.check_losses(contenders, num_steps=2, tolerance=1e-4)
    else:
        harness.check_losses(contenders, num_steps=2, tolerance=1e-4)


def test_tables_and_pictures_are_those_of_the_results(harness) -> None:
    import _results
    import tables

    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        found = _results.read(path)
        assert path.with_suffix(".md").read_text() == tables.markdown(found), f"run `python benchmarks/tables.py {path}`"
        assert path.with_suffix(".svg").read_text() == tables.picture(tables.times_of(found))
