"""Eight virtual CPU devices in every test, and nothing left behind by any."""

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # before any test imports keras
# XLA's optimizations take a third of the default suite's time and decide none of its claims. `make nightly` has them where
# numbers are compared with those of one device, and what slow tests start has them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# What an earlier run, another process or another test has compiled is loaded, in a seventh of the time: `make clean` drops it.
# For each Python apart: JAX compresses the entries otherwise in 3.14.
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax" / str(sys.implementation.cache_tag)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import numpy as np
import pytest
from parameters import nightly
from random_programs import lockstep

import mirrored as mr

ALL_DEVICES = [f"cpu:{i}" for i in range(8)]
mr.MirroredStrategy(ALL_DEVICES)  # starts the backend with 8 devices, whichever test runs first
gc.freeze()  # what is imported stays: no collection looks at it again


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")


@pytest.fixture(params=[1, *nightly(2), 3, *nightly(8)], ids=lambda r: f"R{r}")
def strategy(request: pytest.FixtureRequest) -> mr.MirroredStrategy:
    """A strategy of each size for which the anchor behaves differently."""
    return mr.MirroredStrategy(ALL_DEVICES[: request.param])


@pytest.fixture
def strategy3() -> mr.MirroredStrategy:
    """Three replicas: odd, and no divisor of the usual batch sizes."""
    return mr.MirroredStrategy(ALL_DEVICES[:3])


@pytest.fixture
def strategy2() -> mr.MirroredStrategy:
    """Two replicas."""
    return mr.MirroredStrategy(ALL_DEVICES[:2])


@pytest.fixture
def without_optimizations():
    """Let XLA compile large programs fast; the slow suite optimizes otherwise."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


@pytest.fixture
def in_numpy(request: pytest.FixtureRequest):
    """Let NumPy compute the programs of steps, replicas in lockstep: compiling takes longer than all else.

    What is tested is what the library makes of a step. Where XLA optimizes, and in tests marked `by_xla`, XLA computes.
    """
    by_xla = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "1" or request.node.get_closest_marker("by_xla")
    with contextlib.nullcontext() if by_xla else lockstep.computed():
        yield


@pytest.fixture
def per_replica():
    """Make a PerReplica from one value for each replica."""

    def make(strategy: mr.Strategy, *values: object) -> mr.PerReplica:
        return strategy.distribute_values_from_function(lambda ctx: np.asarray(values[ctx.replica_id_in_sync_group]))

    return make


#: What changes by itself, or is set where keras is imported.
_CHANGES = {"PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TF_FORCE_GPU_ALLOW_GROWTH"}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _CHANGES}


#: Of the processor, which a loaded machine gives no faster: five times what the longest test takes that is not marked slow.
MOST_SECONDS = 50


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest):
    environment, threads, start = _environment(), set(threading.enumerate()), time.process_time()
    yield
    is_slow = request.node.get_closest_marker("slow") or os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
    assert is_slow or time.process_time() - start < MOST_SECONDS, "a test that takes so long is marked slow, or becomes smaller"
    assert _environment() == environment, "a test changed the environment"
    assert mr.has_strategy() is False, "a test left a scope open"
    left = [t for t in threading.enumerate() if t not in threads and t.is_alive() and not t.daemon]
    assert not left, f"a test left threads behind: {left}"


@pytest.fixture
def grains_threads_end():
    """Wait for the threads of grain's iterators: they end when those are closed or collected, and nobody waits."""
    yield
    if threads := [thread for thread in threading.enumerate() if thread.name.startswith("grain")]:
        gc.collect()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), thread


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory():
    yield
    gc.collect()
    gc.freeze()
