"""Parameters of tests that only the slow suite takes: others of the same test make its claim in the default suite."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Mark each value as slow; a tuple is the values of several parameters."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]
