"""Names of topologies; the devices themselves are in test_compiled.py."""

import importlib.util
import os

import jax
import pytest

import mirrored as mr
from mirrored._plan import topologies


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5e:16", "'v5e:16x16'"),
        ("v5e-16x16", "'v5e:16x16'"),
        ("h100", "'h100:1x8'"),
        ("h100:2x9", "'h100"),
        ("???", "one of 'v4"),
    ],
)
def test_an_unknown_name_has_the_nearest(name: str, near: str) -> None:
    with pytest.raises(mr.PlanError, match=r"does not know .*; expected .*hosts with GPUs h100:HOSTSxGPUS") as error:
        mr.topology(name)
    assert near in str(error.value)


@pytest.mark.parametrize(
    ("name", "line"), [("v5e:2x4", "--target ~/.tpu-compiler libtpu"), ("h100:1x8", f"jax-cuda13-plugin=={jax.__version__}")]
)
def test_without_its_compiler_the_line_that_installs_it(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    before = dict(os.environ)
    with pytest.raises(mr.PlanError, match=r"needs .* Write: pip install") as error:
        mr.topology(name)
    assert line in str(error.value) and dict(os.environ) == before


def test_every_listed_name_is_one_of_the_two_kinds() -> None:
    assert all(topologies._TPU.fullmatch(name) or topologies._H100.fullmatch(name) for name in topologies.NAMES)
