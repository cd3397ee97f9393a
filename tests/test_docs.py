"""Every example in a docstring, the README and the docs is executed."""

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from processes import run_program
from source import nodes, trees

import mirrored as mr

ROOT = Path(__file__).parent.parent
MODULES = sorted(info.name for info in pkgutil.walk_packages(mr.__path__, "mirrored."))
_HAS_CODE = re.compile(r"^ *```(\{code-block\} )?(python|pycon)\b", re.MULTILINE)
PAGES = sorted(page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if _HAS_CODE.search(page.read_text()))
#: Its programs are the examples, and test_model_libraries.py runs one of them against its twin for one device.
MODELS = ROOT / "docs" / "model-libraries.md"
#: As in conftest.py: what is compiled quickly, or was compiled before.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
_PROGRAM = (ROOT / "tests" / "page_program.py").read_text()
#: torch is the one library that pages import and the lock has not. What cannot be run without more stays in `py` blocks: the
#: sides of TensorFlow and DDP of the comparisons, and Hydra's five lines, which read a file that is the reader's.
_STUBS = ROOT / "tests" / "page_stubs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


#: Examples that show what is compiled, and many random numbers, which NumPy has not.
_BY_XLA = {"mirrored._report.profile", "mirrored._testing.programs", "mirrored._replicas.context"}


@pytest.mark.usefixtures("in_numpy")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.by_xla] * (name in _BY_XLA)) for name in MODULES])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    known = {"mr": mr, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "strategy": mr.MirroredStrategy(["cpu:0", "cpu:1"])}
    for test in doctest.DocTestFinder().find(module, name, globs={**vars(module), **known}):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def _run(page: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_program(_PROGRAM, page, _STUBS, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [*(page for page in PAGES if page != MODELS), *nightly(MODELS)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_page_examples(page: Path) -> None:
    """Run a page as a reader does who copies its blocks into a file: in order, in a new process, with nothing before them."""
    for library in re.findall(r"^(?:import|from) (keras|flax|equinox)\b", page.read_text(), re.MULTILINE):
        pytest.importorskip(library)
    done = _run(page, env=_ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_forgets_its_imports_fails(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```python\nstrategy = mr.MirroredStrategy()\n```\n")
    done = _run(tmp_path / "page.md")
    assert done.returncode == 1 and "NameError: name 'mr' is not defined" in done.stderr
    (tmp_path / "page.md").write_text("```pycon\n>>> 1 + 1\n3\n```\n")
    done = _run(tmp_path / "page.md")
    assert done.returncode == 1 and "Got:\n    2" in done.stdout


_PUBLIC = ("launch", "testing", "losses", "data", "optimizer")
_OF_A_CHECKOUT = re.compile(r"(?<![/\w])(?:docs|tests|examples|benchmarks|tools)/\w")


def test_what_an_installed_wheel_says_names_no_file_of_a_checkout() -> None:
    """Public docstrings and the texts of the code; notes of private modules are for those who have the source."""
    public = {name: getattr(mr, name) for name in mr.__all__} | {
        name: importlib.import_module(f"mirrored.{name}") for name in _PUBLIC
    }
    documented = {f"{name}.{member}": thing for name, one in public.items() for member, thing in inspect.getmembers(one)} | public
    assert [name for name, thing in documented.items() if _OF_A_CHECKOUT.search(inspect.getdoc(thing) or "")] == []
    texts = []
    for name, tree in trees().items():
        notes = {id(node.value) for node in nodes(tree)[ast.Expr]}
        constants = [node.value for node in nodes(tree)[ast.Constant] if id(node) not in notes]
        texts += [(name, value) for value in constants if isinstance(value, str | bytes) and _OF_A_CHECKOUT.search(str(value))]
    assert texts == []
