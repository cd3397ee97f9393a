"""The computations of `mirrored check` find a wrong sum, workers that differ, and a slow one."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from mirrored._command import check_sums
from mirrored._workers.coordination import Coordination


class Canned(Coordination):
    """A worker 0 whose two peers answer with what it says, multiplied."""

    def exchange(self, channel: str, value: Any, timeout_seconds: float | None = None) -> Any:
        if channel == "check/digests":
            return [value, value + 1, value]
        return [value, value * 30, value] if channel == "check/medians" and value > 2e-4 else [value] * 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_sums, "LENGTHS", (1, 1009))


def test_a_wrong_sum_is_found(strategy2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, calls = check_sums._make_all_reduce, itertools.count()

    def make_wrong(*args: Any) -> Callable[[], Any]:
        work, factor = make(*args), 1.001 if next(calls) >= 3 else 1
        return lambda: jnp.asarray(work()) * factor

    monkeypatch.setattr(check_sums, "_make_all_reduce", make_wrong)
    problems = check_sums.sums(strategy2, Coordination()).problem.split("; ")
    assert len(problems) == 3
    for kind, problem in zip(("integers", "whole floats", "floats"), problems, strict=True):
        assert re.fullmatch(rf"sum of 1009 {kind}: element \d+ is [\d.]+, expected [\d.]+", problem)


def test_results_that_differ_by_worker_are_found(strategy2: Any) -> None:
    problems = check_sums.sums(strategy2, Canned()).problem.split("; ")
    assert len(problems) == 2 * 3
    assert problems[0] == "sum of 1 integers: the workers have different results"


def test_a_slow_worker_is_marked() -> None:
    listed = check_sums.computing(Canned()).fact
    assert re.fullmatch(r"worker 0 [\d.]+, worker 1 [\d.]+ SLOW, worker 2 [\d.]+ ms", listed)
    assert "SLOW" not in check_sums.messages(Canned()).fact
