"""The notebook of the examples shows what its cells show today."""

import json
import re

import notebook
import pytest


def shown(book):
    """Return what the cells show, numbers with three digits after the point."""
    text = json.dumps([cell.get("outputs") for cell in book["cells"]], indent=1)
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", text)


@pytest.mark.usefixtures("strategy2")  # the devices are there
def test_the_outputs_of_the_notebook_are_those_of_its_cells():
    kept = json.loads(notebook.PATH.read_text())
    assert shown(kept) == shown(notebook.executed()), "run `python tests/notebook.py`, and look at what has changed"
    assert [cell["execution_count"] for cell in kept["cells"] if cell["cell_type"] == "code"] == list(range(1, 9))
    [error] = [output for cell in kept["cells"] for output in cell.get("outputs", ()) if output["output_type"] == "error"]
    assert error["ename"] == "ReplicasDivergeError" and len(error["traceback"]) == 1
