"""A plugin of pytest that runs Keras' own tests, each in the scope of a strategy: nothing may become different.

Keras' package has its tests. See run.py.
"""

import os
from collections.abc import Iterator

os.environ["KERAS_BACKEND"] = "jax"

import pytest

import mirrored as mr

_strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(int(os.environ.get("REPLICAS", "3")))])


@pytest.fixture(autouse=True)
def _in_scope() -> Iterator[None]:
    with _strategy.scope():
        yield
