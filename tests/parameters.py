"""Parameters of tests that only `make nightly` takes: others of the same test make its claim in the default suite."""

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Mark each value as nightly; a tuple is the values of several parameters."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in values]
