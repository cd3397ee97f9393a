"""What a call raises, as a worker of a test tells it."""

from collections.abc import Callable


def error_of(call: Callable[[], object]) -> str:
    """Call a function, and return the error that it raises, in words."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
