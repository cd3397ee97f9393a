"""A JAX that nobody has tried is told, once; the tried ones are those of the lock file, the metadata and the README."""

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

from mirrored._jax import versions

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = (".".join(map(str, version)) for version in (versions.OLDEST, versions.NEWEST))


def imported(version: str) -> subprocess.CompletedProcess[str]:
    """Import the library twice beside a JAX that calls itself `version`."""
    number = tuple(map(int, version.split(".")))
    code = (
        f"import jax; jax.__version__ = {version!r}; jax.__version_info__ = {number}\n"
        "import mirrored, importlib\n"
        "from mirrored import data\n"
        "print(mirrored.MirroredStrategy(['cpu:0']).num_replicas_in_sync)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)


@pytest.mark.parametrize("version", ["0.13.0", "1.0.0"])
def test_an_untried_version_is_told_once_where_the_user_imports(version: str) -> None:
    ended = imported(version)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert ended.stderr.count("UserWarning") == 1
    assert ended.stderr.startswith("<string>:2: UserWarning: ")
    assert f"this is jax {version}; this version of mirrored was tried with jax {OLDEST} to {NEWEST}." in ended.stderr


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [
        ((0, 10, 1), False),
        (versions.OLDEST, True),
        ((0, 11, 2), True),
        ((0, 12, 0), True),
        (versions.NEWEST, True),
        ((0, 12, 0, 2), False),
        ((0, 12, 1), False),
    ],
)
def test_the_tried_range(version: tuple[int, ...], is_tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.warn_if_untried()
    assert len(caught) == (not is_tried)


def test_the_tried_versions_are_those_that_are_installed_and_promised() -> None:
    assert versions.OLDEST <= jax.__version_info__ <= versions.NEWEST
    lock = (ROOT / "requirements.lock").read_text()
    assert re.findall(r"^jax==(\S+)", lock, re.M) == [OLDEST, NEWEST]
    assert f"jax>={OLDEST}" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for page in ("README.md", "docs/design/dependencies.md"):
        text = (ROOT / page).read_text()
        assert f"jax {OLDEST}" in text and f"jax {NEWEST}" in text, page


def test_the_oldest_python_of_the_metadata_is_the_oldest_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.M)
    assert project["requires-python"] == f">={pythons[0]}"
    tried = (ROOT / "tools" / "newest-python").read_text()
    assert f"set -- {' '.join(reversed(pythons))}\n" in tried
