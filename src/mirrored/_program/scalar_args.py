"""Python numbers among the arguments are traced, and so have no value while a step is traced: the message where one needs it."""

from __future__ import annotations

from .._errors import OneProgramError
from .._jax import complaints, user_code
from .call import NUMBERS, Call, argument_names


def explain(error: Exception, call: Call) -> None:
    """Raise an error that names the numbers whose values Python needed, in place of JAX's; return where there are none.

    Args:
        error: what the user's code raised while it was traced.
        call: what was traced.
    """
    needed = complaints.needed_arguments(error)
    # A number in an mr.function is an array there already, of a weak type.
    numbers = [position for position, leaf in enumerate(call.array_leaves()) if leaf.is_weak and not leaf.shape]
    if needed is None or not numbers or not set(needed).issubset(numbers):
        return
    names = [argument_names(call)[position] for position in needed or numbers]
    name, value = names[0].strip("`"), call.arrays[(needed or numbers)[0]]
    function = call.function.__name__ if getattr(call.function, "__name__", "").isidentifier() else "step"
    bound = f"functools.partial({function}, {name}={value if type(value) in NUMBERS else '...'})"
    bound = bound if name.isidentifier() else "a step that closes over it"
    raise OneProgramError(
        f"Python needed the value of {' and '.join(names)}, at {user_code.raising_line(error)}. Bind a number that `if`, `range` "
        f"or a shape needs: {bound}; each value of it has a program of its own. Python numbers among the arguments are "
        "traced, as under jax.jit, so that another number needs no other program."
    ).with_traceback(error.__traceback__) from None
