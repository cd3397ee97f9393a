"""A profile has each run of a program as a step, and ends in every way."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._program import program
from mirrored._report import profile as profile_module


class Recorder:
    """The profiler of JAX, without its cost: what was begun and ended, in order."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def start_trace(self, path: Path) -> None:
        self.seen.append(path.name)

    def stop_trace(self) -> None:
        self.seen.append("stopped")

    @contextlib.contextmanager
    def mark(self, name: str, step_num: int) -> Iterator[None]:
        self.seen.append((name, step_num))
        yield
        self.seen.append("end")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, getattr(found, name))
    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", found.mark)
    return found


def double(x: object) -> object:
    return x * 2


def refuse(x: object) -> object:
    raise ArithmeticError("refused")


double.__qualname__ = "double"


def test_each_run_is_a_step_with_its_name_and_number(strategy2: mr.MirroredStrategy, recorder: Recorder, tmp_path: Path) -> None:
    function = mr.function(lambda x: strategy2.run(double, args=(x,)))
    strategy2.run(double, args=(np.ones(2),))
    with mr.profile(tmp_path / "p") as path:
        strategy2.run(double, args=(np.ones(2),))
        strategy2.run(double, args=(np.ones(2),))
        function(np.ones(2))
    strategy2.run(double, args=(np.ones(2),))
    assert path == tmp_path / "p"
    name = "test_each_run_is_a_step_with_its_name_and_number.<locals>.<lambda>"
    assert recorder.seen == ["p", ("double", 0), "end", ("double", 1), "end", (name, 0), "end", "stopped"]


def test_the_block_waits_for_programs_whose_results_nobody_has_asked_for(
    strategy3: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch, recorder: Recorder, tmp_path: Path
) -> None:
    long = lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), x)  # noqa: E731
    found: list[jax.Array] = []
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: recorder.seen.append([array.is_ready() for array in found]))
    strategy3.run(long, args=(np.ones((200, 200), np.float32),))
    with mr.profile(tmp_path):
        found += [strategy3.run(long, args=(np.ones((200, 200), np.float32),)) for _ in range(3)]
    assert recorder.seen[-1] == [True] * 3


def test_a_profile_ends_when_the_block_fails_and_there_is_one_at_a_time(
    strategy2: mr.MirroredStrategy, recorder: Recorder, tmp_path: Path
) -> None:
    with pytest.raises(ArithmeticError), mr.profile(tmp_path):
        with pytest.raises(RuntimeError, match="already"):
            mr.profile(tmp_path).__enter__()
        strategy2.run(refuse, args=(np.ones(2),))
    assert recorder.seen[-1] == "stopped" and program.annotate is None
    [rows] = strategy2.distribute_dataset([np.arange(4.0)])
    with mr.profile(tmp_path):
        result = strategy2.run(double, args=(rows,))
    assert strategy2.gather(result, axis=0).tolist() == [0, 2, 4, 6]


def test_a_worker_writes_into_its_own_folder(
    strategy2: mr.MirroredStrategy, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_module, "joint_strategy", lambda: strategy2)
    with mr.profile(tmp_path) as path:
        pass
    assert path == tmp_path / "worker_0"
