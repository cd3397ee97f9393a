"""The notebook of the examples: run its cells as Jupyter does, and write what they show: `python tests/notebook.py`."""

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


def outputs_of(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return what Jupyter would keep of it: printed lines, an exception's last line, and the last expression."""
    *body, last = ast.parse(source).body
    tail = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
    body += [] if tail else [last]
    printed, value, outputs = io.StringIO(), None, []
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "notebook", "exec"), names)
            value = eval(compile(tail, "notebook", "eval"), names) if tail else None
    except Exception as error:
        lines = [f"{type(error).__module__}.{type(error).__qualname__}: {error}"]
        outputs.append({"output_type": "error", "ename": type(error).__qualname__, "evalue": str(error), "traceback": lines})
    if text := printed.getvalue():
        outputs.insert(0, {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append({"output_type": "execute_result", "data": shown, "metadata": {}, "execution_count": None})
    return outputs


def executed() -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, run one after the other."""
    book, names, count = json.loads(PATH.read_text()), {"__name__": "__main__"}, 0
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"], cell["outputs"] = count, outputs_of("".join(cell["source"]), names)
            for output in cell["outputs"]:
                if "execution_count" in output:
                    output["execution_count"] = count
    return book


if __name__ == "__main__":
    PATH.write_text(json.dumps(executed(), indent=1) + "\n")
