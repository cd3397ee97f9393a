"""Every example in a docstring, the README and the docs is executed."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr

ROOT = Path(__file__).parent.parent
MODULES = sorted(info.name for info in pkgutil.walk_packages(mr.__path__, "mirrored."))
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _names() -> dict[str, object]:
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    return {"mr": mr, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "strategy": strategy}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, name, globs={**vars(module), **_names()}):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_examples(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the blocks of a page in order, in one namespace; `>>>` blocks are compared with their output."""
    text = page.read_text()
    for library in re.findall(r"^(?:import|from) (keras|flax|equinox)\b", text, re.MULTILINE):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    names = _names()
    for language, block in re.findall(r"```(?:\{code-block\} )?(\w*)[^\n]*\n(?::[^\n]*\n)*(.*?)```", text, re.DOTALL):
        if language == "python":
            exec(compile(block, str(page), "exec"), names)
        elif language == "pycon":
            runner, report = doctest.DocTestRunner(optionflags=FLAGS), []
            test = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0)
            runner.run(test, out=report.append, clear_globs=False)
            names.update(test.globs)
            assert runner.failures == 0, "".join(report)
