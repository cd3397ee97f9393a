"""Where arrays in parts are gathered, where sums become reduce-scatters, and that only the proof says what is in parts."""

import collections
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored._program.passes import fuse_all_reduces, order_sums
from mirrored._replicas import collectives, division

WIDTH = 24


@pytest.fixture(autouse=True)
def small_arrays_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take arrays of 512 bytes for large."""
    monkeypatch.setattr(division, "LEAST_BYTES", 512)
    monkeypatch.setattr(order_sums, "LARGE_BYTES", 512)
    for module in (collectives, fuse_all_reduces):
        monkeypatch.setattr(module, "PACK_BELOW_BYTES", 512)


@pytest.fixture
def in_parts() -> mr.MirroredStrategy:
    return mr.MirroredStrategy([f"cpu:{i}" for i in range(3)], storage="parts")


def collectives_in(strategy: mr.Strategy, step: Callable[..., Any], batch: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Run a step; return how many collectives of arrays its program has, by kind and dtype, and where."""
    from mirrored._program.program import StepProgram

    found: list[Any] = []
    run = StepProgram.run
    monkeypatch.setattr(StepProgram, "run", lambda self, arrays: (found.append(self), run(self, arrays))[1])
    strategy.run(step, args=(batch,))
    ...
