"""A JAX that nobody has tried is told, once; the tried ones are those of the lock file, the metadata and the README."""

import re
import tomllib
import warnings
from pathlib import Path

import jax
import pytest
from processes import run_program

from mirrored._jax import versions

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = (".".join(map(str, version)) for version in (versions.OLDEST, versions.NEWEST))
#: Imports the library inside a trace, which is known for one there too, beside a JAX that calls itself 1.0.0.
PROGRAM = """
import sys
for name in [name for name in sys.modules if name.startswith("mirrored")]:  # of the process that this one was forked from
    del sys.modules[name]
import jax; jax.__version__, jax.__version_info__ = "1.0.0", (1, 0, 0)
def f(x):
    from mirrored._jax import tracing
    assert tracing.is_staging() and tracing.current_trace() is not tracing.NO_TRACE
    return x
jax.jit(f)(1.0)
import mirrored, importlib
from mirrored import data
from mirrored._jax import tracing
assert not tracing.is_staging()
jax.jit(lambda x: [x, setattr(f, 'seen', tracing.is_staging())][0])(2.0)
assert f.seen
print(mirrored.MirroredStrategy(['cpu:0']).num_replicas_in_sync)
"""


def test_an_untried_version_is_told_once_at_the_first_public_name_also_inside_a_trace() -> None:
    ended = run_program(PROGRAM, env={"JAX_PLATFORMS": "cpu"})
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert ended.stderr.count("UserWarning") == 1
    assert re.match(r"\S+program\.py:12: UserWarning: ", ended.stderr), ended.stderr
    assert f"this is jax 1.0.0; this version of mirrored was tried with jax {OLDEST} to {NEWEST}." in ended.stderr


def test_the_tried_range(monkeypatch: pytest.MonkeyPatch) -> None:
    untried = [(0, 11, 2), (0, 12, 0, 2), (0, 12, 1)]
    for version in (versions.OLDEST, versions.NEWEST, *untried):
        monkeypatch.setattr(jax, "__version_info__", version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            versions.warn_if_untried()
        assert len(caught) == (version in untried), version


def test_the_tried_versions_are_those_that_are_installed_and_promised() -> None:
    assert versions.OLDEST <= jax.__version_info__ <= versions.NEWEST
    locks = [(ROOT / f"requirements{which}.lock").read_text() for which in ("-oldest", "")]
    assert [re.findall(r"^jax==(\S+)", lock, re.M) for lock in locks] == [[OLDEST], [NEWEST]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"jax>={OLDEST}" in project["dependencies"]
    for page in ("README.md", "docs/design/dependencies.md"):
        text = (ROOT / page).read_text()
        assert f"jax {OLDEST}" in text and f"jax {NEWEST}" in text, page
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.M)
    assert project["requires-python"] == f">={pythons[0]}"
    assert f"set -- {' '.join(reversed(pythons))}\n" in (ROOT / "tools" / "newest-python").read_text()
