"""The benchmarks: the harness compares fairly, and every file runs and prints its table."""

import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from parameters import nightly
from processes import run_program

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

PEERS = ("TensorFlow MirroredStrategy", "PyTorch DDP")
#: What the tables of each file must name.
FILES = {
    "uneven_step": ("plain: uneven step", "normalized: uneven step", "compiling"),
    "input_files": ("mirrored", "plain reader", "grain's TFRecord reader"),
    "step_time": ("W1:", "| mirrored", "by hand, packed", "one device", *map("skipped: {}".format, PEERS)),
    "loop": ("by hand, packed, paced", "lax.scan by hand", "run, then reduce", "mr.function", "mr.scan", "R = 8"),
    "overhead": ("2 variables", "200 variables", "60 us"),
    "gpu": ("W1 mirrored", "4 replicas, one_by_one", "ResNet of 4 convolutions"),
    "compile_time": ("mirrored, R=8", "1.30", "traces of the user's function"),
    "memory": ("by hand", "mirrored"),
    "libraries": ("Keras fit:",),
    "models": ("NNX: convolutions", "NNX: transformer"),
    "input_overlap": ("step alone", "waits, 2 batches ahead", "in the loop"),
    "tfrecord_read": ("records of 100 KiB", "grain, no checksums", "parse_example"),
    "workers": ("W1: mirrored", "W1, no guard: mirrored", "start: by hand", "launcher: mirrored"),
    "control_plane": ("all are equal", "DATA, a batch", "a save", "guard, 1,024 workers"),
    "random_numbers": ("plain JAX", "by rows, R = 1", "folded, R = 2"),
    "virtual_replicas": ("W1:", "one device", "on 1 device, together", "on 2 devices, one_by_one"),
    "scaling": ("the all-reduce", "2 replicas", "W1, 2 replicas", "foretold"),
    "all_reduce": ("20 x 4 KiB", "packed below", "alone", "strategy.reduce of a tree", "strategy.gather of a tree"),
    "transfers": ("device_put", "distribute_dataset", "distribute_values_from_function", "gather", "4 replicas"),
}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    """The module that all benchmark files share."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _harness

    return _harness


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
    assert [name for name in FILES[file] if name not in ended.stdout] == []


@pytest.mark.slow
def test_without_a_gpu_its_benchmark_says_so(tmp_path: Path) -> None:
    ended = run_program(RUN, tmp_path, BENCHMARKS / "gpu.py", timeout=60)
    assert ended.stdout.startswith("skipped: JAX has found no GPU") and ended.returncode == 0, ended.stderr


def test_run_all_runs_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run_all

    shared = {path.stem for pattern in ("_*.py", "peer_*.py", "run_all.py", "tables.py") for path in BENCHMARKS.glob(pattern)}
    assert set(run_all.FILES) == set(FILES) == {path.stem for path in BENCHMARKS.glob("*.py")} - shared


def test_contenders_take_the_same_number_of_steps_in_rotating_order(harness, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
    turns: list[tuple[str, int]] = []

    def contender(name: str):
        def run(num_steps: int) -> float:
            nonlocal now
            now += num_steps * 1e-6
            turns.append((name, num_steps))
            return 0.0

        return harness.Contender(name, run)

    times = harness.interleave([contender("a"), contender("b"), contender("c")], num_rounds=3, turn=1e-4)
    timed = turns[3:]  # the first turn of each finds the number of steps
    assert "".join(name for name, _ in timed) == "abcbcacab"
    assert len({num_steps for _, num_steps in timed}) == 1
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"a": 3, "b": 3, "c": 3}


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


def test_a_row_passes_when_the_median_of_its_ratios_inside_a_round_meets_the_goal(harness) -> None:
    times = harness.Times({"by hand": [1.0, 10.0, 2.0], "ours": [1.1, 11.0, 2.2]})
    assert times.ratios("ours", "by hand") == pytest.approx([1.1, 1.1, 1.1])
    for samples, goal, verdict in (
        ([1.0, 1.1, 1.2], 1.15, "pass"),
        ([1, 1.2, 1.3], 1.15, "FAIL"),
        ([1.0], None, ""),
        ([], 1.0, ""),
    ):
        assert harness.Row("what", "1 ms", samples, goal).cells()[-1] == verdict
    for seconds, shown in ((2.5, "2.5 s"), (0.0123, "12.3 ms"), (45.6e-6, "45.6 us")):
        assert harness.show_seconds(seconds) == shown


def test_tables_are_recorded_written_and_drawn(harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import _results
    import tables

    monkeypatch.setattr(harness, "_options", harness._options)  # put back what `parse` sets
    monkeypatch.setattr("sys.argv", ["step_time.py", f"--record={tmp_path / 'new' / 'r.jsonl'}"])
    harness.parse("")
    for num_replicas, seconds in ((1, 2e-4), (8, 3e-3), (8, 2e-3)):
        row = harness.Row("mirrored", "2 ms", [1.0, 1.5, 1.1], 1.15, seconds=seconds)
        harness.print_table(f"W1, R = {num_replicas}", [row], workload="W1", num_replicas=num_replicas)
    found = _results.read(tmp_path / "new" / "r.jsonl")
    assert [table["rows"][0]["samples"] for table in found] == [[1.0, 1.5, 1.1]] * 3
    text = tables.markdown(found)
    assert "## step_time.py" in text and "### W1, R = 8" in text and "| mirrored | 2 ms | 1.10 |  | 1.15 | pass |" in text
    times = tables.times_of(found)
    assert times == {"W1": {"mirrored": {1: 2e-4, 8: 2e-3}}}  # the later of two
    root = ElementTree.fromstring(tables.picture(times))
    assert len(root.findall("{*}circle[@class='ours']")) == 2 and len(root.findall("{*}circle")) == 2
    assert {text.text for text in root.findall("{*}text")} >= {"R = 1", "R = 8", "0.2 ms", "2 ms", "W1 linear", "by hand"}
    monkeypatch.setattr("sys.argv", ["step_time.py", "--quick", "--record=x"])
    with pytest.raises(SystemExit):
        harness.parse("")


def test_tables_and_pictures_are_those_of_the_results(harness) -> None:
    import _results
    import tables

    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        found = _results.read(path)
        assert path.with_suffix(".md").read_text() == tables.markdown(found), f"run `python benchmarks/tables.py {path}`"
        assert path.with_suffix(".svg").read_text() == tables.picture(tables.times_of(found))
