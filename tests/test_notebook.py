"""The notebook of the examples shows what its cells show today."""

import importlib.util
import json
import re

import notebook
import pytest


def shown(book):
    """Return what the cells show, numbers with three digits after the point, and without the time of compilations."""
    text = json.dumps([cell.get("outputs") for cell in book["cells"]], indent=1)
    text = re.sub(r"(compilations?: )[\d.]+ \w+", r"\1", text)
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", text)


@pytest.mark.usefixtures("strategy2")  # the devices are there
def test_the_outputs_of_the_notebook_are_those_of_its_cells():
    kept = json.loads(notebook.PATH.read_text())
    assert shown(kept) == shown(notebook.executed()), "run `python tests/notebook.py`, and look at what has changed"
    assert [cell["execution_count"] for cell in kept["cells"] if cell["cell_type"] == "code"] == list(range(1, 9))
    [error] = [output for cell in kept["cells"] for output in cell.get("outputs", ()) if output["output_type"] == "error"]
    assert error["ename"] == "ReplicasDivergeError" and len(error["traceback"]) == 1


def test_the_page_of_the_documentation_has_every_cell_and_output_and_runs_nothing():
    path = notebook.PATH.parents[1] / "docs" / "_ext" / "notebook_cells.py"
    spec = importlib.util.spec_from_file_location("notebook_cells", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    book = json.loads(notebook.PATH.read_text())
    text = module.as_markdown(book)
    assert not text.startswith("# ") and text.count("`````python") == 8
    for cell in book["cells"]:
        assert "".join(cell["source"]).split("\n")[-1] in text
        for output in cell.get("outputs", ()):
            kept = output.get("data", {}).get("text/html") or output.get("text") or [output["evalue"]]
            assert "".join(kept).strip() in text
    plain = {"output_type": "display_data", "data": {"text/plain": ["3"]}}
    code = {"cell_type": "code", "source": ["raise SystemExit"], "outputs": [plain]}
    assert module.as_markdown({"cells": [code]}).endswith(":class: cell-text\n\n3\n`````")
