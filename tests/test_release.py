"""What a release needs is there and agrees: one version, a citation, workflows, forms, and a program that tries the wheel."""

import re
import tomllib
from pathlib import Path

import yaml

import mirrored as mr

ROOT = Path(__file__).parent.parent


def load(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_version_is_written_in_one_place_and_repeated_in_the_citation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/mirrored/__init__.py"
    citation = load("CITATION.cff")
    assert citation["version"] == mr.__version__ and citation["license"] == project["project"]["license"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (Unreleased|{re.escape(mr.__version__)} - \d{{4}}-\d\d-\d\d)$", changelog, re.M)


def test_the_workflows_run_what_developers_run() -> None:
    jobs = load(".github/workflows/ci.yml")["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands == {"linux": [".ci/run"], "macos": ["make test PYTHON=python"], "wheel": ["make dist PYTHON=python"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert jobs["linux"]["steps"][1]["with"]["python-version"].split() == [tried[0], tried[-1]]
    assert jobs["macos"]["strategy"]["matrix"]["python"] == [tried[0], tried[-1]]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"test", "dist"} <= set(targets)
