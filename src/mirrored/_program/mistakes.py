"""The mistakes in a step behind errors of JAX's and Python's, and the lines to write instead."""

from __future__ import annotations

import dataclasses

import jax

from .._errors import ContextError, OneProgramError, PerReplicaError
from .._jax import complaints, jaxprs, tracing, user_code
from .._models import libraries
from .._replicas.per_replica import is_per_replica
from .._typing import REPLICA_AXIS
from .call import NUMBERS, Call, argument_names, leaf_names

_NO_VALUE = "A step is traced once and compiled: its arrays have no values yet. jax.debug.print('{}', x) shows them."
#: Methods and attributes of TensorFlow's or torch's arrays -> what to write instead.
_NOT_OF_ARRAYS = {
    "numpy": f"Return the array from the step, and write np.asarray(result) outside. {_NO_VALUE}",
    "backward": "Write loss, gradients = mr.value_and_grad(loss_fn, variables)(); optimizer.apply_gradients(gradients).",
    "grad": "Write gradients = mr.grad(loss_fn, variables)().",
    "detach": "Write jax.lax.stop_gradient(x).",
    **dict.fromkeys(
        ("block_until_ready", "copy_to_host_async"),
        f"Leave it out, or write jax.block_until_ready(result) outside of the step. {_NO_VALUE}",
    ),
    "sharding": "Leave it out: in a step an array is one replica's; jax.typeof(x) is its type, jax.typeof(x).dtype a part of it.",
    **dict.fromkeys(
        ("cpu", "cuda", "to", "device"), "Leave it out: each replica's arrays are on its device; x.astype changes the dtype."
    ),
}
#: JAX's error -> the line to write instead, and the code that it replaces.
_INSTEAD: dict[type[Exception], tuple[str, str]] = {
    jax.errors.TracerBoolConversionError: (
        "jnp.where(condition, a, b), or mr.cond(condition, make_a, make_b)",
        "in place of `if`, `and`, `or`, `not` and `assert`, join conditions with &, | and ~, and repeat with mr.fori_loop or "
        "jax.lax.while_loop in place of `while`.",
    ),
    jax.errors.TracerArrayConversionError: (
        "jnp.mean for np.mean, or np.asarray(result) outside of the step",
        "because np.asarray, variable.numpy() and all functions of numpy need values.",
    ),
    jax.errors.TracerIntegerConversionError: (
        "jnp.asarray(items)[i], or mr.fori_loop(0, n, body, init)",
        "because range(), sizes, and the items of lists need Python's ints.",
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "jnp.where(mask, x, 0)",
        "in place of x[mask], of which nobody knows yet how long it is.",
    ),
    jax.errors.ConcretizationTypeError: (
        "float(result) outside of the step, which returns the array",
        "because float(), int(), x.item(), x.tolist() and shapes need values; another dtype is x.astype(jnp.int32).",
    ),
}

#: A complaint of JAX's or Python's -> the message.
_WRONG_TYPES = {
    "function is unpacked": "a function was unpacked, at {}. mr.value_and_grad returns a function; call it: loss, gradients = "
    "mr.value_and_grad(loss_fn, variables)().",
    "array for torch": "a function of torch was given an array of JAX, at {}. A step is a program of JAX: write it with "
    "jax.numpy, or with a model of Keras, NNX, Linen or Equinox.",
    "array is called": "an array was called like a function, at {}. The value of a variable is an attribute here: write "
    "variable.value or variable.read_value(), where TensorFlow has variable.value().",
    "key by rows": "a function of jax.random that takes JAX's own keys only, such as poisson, was given a key by rows, at {}. "
    "Write ctx.rng(key, by_rows=False): what is drawn with it differs by replica.",
    "variable is not converted": "a function of jax.lax, or the index of an array, was given a variable, at {}; these take "
    "arrays only, and of Keras' variables so do jax.jit, jax.grad and loops. Write variable.value, as in "
    "jax.lax.exp(variable.value) and x[:, variable.value]; functions of jax.numpy take variables too: jnp.exp(variable).",
    "variable beside an array": "optax.apply_updates, or another function that walks two trees, was given variables in one and "
    "arrays in the other, at {}. It returns new arrays, and would change no variable. Write optimizer = mr.Optimizer(tx, "
    "variables) before the step and optimizer.apply_gradients(gradients) in it; or give optax the values, "
    "jax.tree.map(jnp.asarray, variables), and assign what it returns: variable.assign(new).",
}


def explain(error: Exception, call: Call, knows_id: bool = False) -> None:
    """Replace `error`, which the user's code raised in a trace, by one with the line to write; return if none is known.

    `knows_id` tells whether the step has asked for the replica's number.
    """
    where = user_code.raising_line(error)
    explanation = _explain_number(error, call, where) or _explain_object(error, call)
    arguments = [(name, value) for name, (value, *_) in zip(leaf_names(call), call.leaves, strict=True)]
    of_libraries = (library.explain(error, arguments, where) for library in libraries.imported())
    explanation = explanation or next(filter(None, of_libraries), None) or _explain_code(error, where, knows_id)
    if explanation is not None:
        raise explanation.with_traceback(error.__traceback__) from None


def refuse_devices(jaxpr: jaxprs.Jaxpr, maps: frozenset[str], num_devices: int) -> None:
    """Refuse what XLA would end the process for: ordered prints on several devices, the primitives `maps`, Explicit axes."""
    found = [_refusal(inner, top, maps, num_devices) for top in jaxpr.eqns for inner in (top, *jaxprs.inside(top))]
    for error in sorted(filter(None, found), key=lambda error: "<unknown>" in str(error)):  # first those that name a line
        raise error


def _refusal(equation: jaxprs.Equation, around: jaxprs.Equation, maps: frozenset[str], num_devices: int) -> Exception | None:
    if num_devices > 1 and jaxprs.is_ordered_print(equation):
        return ValueError(
            "jax.debug.print or jax.debug.callback was given ordered=True, at "
            f"{user_code.equation_line(equation, around)}. JAX keeps an order on one device only, and this program runs on "
            f"{num_devices} devices. Leave ordered=True out; print ctx.replica_id_in_sync_group too, to see whose a value is."
        )
    if equation.primitive.name in maps and max(num_devices, equation.params["mesh"].size) > 1:
        return ContextError(
            f"jax.shard_map or jax.pmap was called in a step, at {user_code.equation_line(equation, around)}, and a step "
            "runs on each replica's one device. Leave the map out: strategy.run maps the step itself. For a function of "
            "each row write jax.vmap(function)(rows); what needs other devices is for outside of the step."
        )
    if tracing.have_explicit_axes([equation]):
        return ValueError(
            f"an array on a mesh with Explicit axes is used at {user_code.equation_line(equation, around)}: its type has the "
            "devices of that mesh, the program those of the strategy. Pass it to the step, which brings it there: "
            "strategy.run(step, args=(..., x)). Or make the mesh with axis_types=(jax.sharding.AxisType.Auto,)."
        )
    if maps and jaxprs.placements_in([equation]):
        return ContextError(
            f"a step places an array on devices that it names, at {user_code.equation_line(equation, around)}, and a step runs "
            "on each replica's one device. Leave out jax.device_put, with_sharding_constraint, or the sharding or device of "
            "jax.jit, jnp or a callback there: strategy.run places what a step uses. Other devices are for outside of the step."
        )
    return None


def _explain_number(error: Exception, call: Call, where: str) -> OneProgramError | None:
    """Name the Python numbers among the arguments, if the trace failed because Python needed their values and no others."""
    # A number in an mr.function is an array there already, of a weak type; those of mr.scan and the like are not bound.
    is_ours = str(getattr(getattr(call.function, "func", None), "__module__", "")).startswith("mirrored.")
    numbers = [i for i, leaf in enumerate(call.array_leaves()) if leaf.is_weak and not leaf.shape and not is_ours]
    needed = complaints.needed_arguments(error, numbers)
    if not needed or not set(needed).issubset(numbers):
        return None
    names = [argument_names(call)[position] for position in needed]
    name, value = names[0].strip("`"), call.arrays[needed[0]]
    bound = "a step that closes over it"
    if name.isidentifier():
        function = getattr(call.function, "__name__", "")
        if not function.isidentifier():  # a lambda has no name to write
            function = "step"
        number = value if type(value) in NUMBERS else "..."
        bound = f"functools.partial({function}, {name}={number})"
    return OneProgramError(
        f"Python needed the value of {' and '.join(names)}, at {where}. Bind a number that `if`, `range` "
        f"or a shape needs: {bound}; each value of it has a program of its own. Python numbers among the arguments are "
        "traced, as under jax.jit, so that another number needs no other program."
    )


def _explain_object(error: Exception, call: Call) -> TypeError | None:
    """Name the argument in which JAX does not look for PerReplica values, so that they came into the step whole."""
    if not (isinstance(error, PerReplicaError) or is_per_replica(getattr(error, "obj", None))):
        return None
    for name, (value, *_) in zip(leaf_names(call), call.leaves, strict=True):
        if dataclasses.is_dataclass(value) and any(
            is_per_replica(getattr(value, f.name, None)) for f in dataclasses.fields(value)
        ):
            return TypeError(
                f"the argument {name} is a {type(value).__name__} that holds a PerReplica, and JAX cannot look into it. "
                "Register it with @jax.tree_util.register_dataclass above the class, or pass a dict, tuple or namedtuple."
            )
    return None


def _explain_code(error: Exception, where: str, knows_id: bool) -> Exception | None:
    complaint, name = complaints.complaint_of(error)
    if complaint == "no static number":
        return OneProgramError(
            f"Python needed the value of an array, at {where}. {name} Write\n    jnp.nonzero(mask, size=n)\n"
            "with a number that is no array: shapes do not depend on values. jnp.bincount takes length=n, jnp.repeat "
            f"total_repeat_length=n; jnp.where(mask, x, 0) keeps the shape. {_NO_VALUE}"
        )
    if isinstance(error, complaints.NEEDS_A_VALUE):
        if knows_id:
            return OneProgramError(
                f"Python needed the value of something that differs by replica, at {where}. Write\n"
                "    jnp.where(ctx.replica_id_in_sync_group == 0, a, b)\n"
                "or jax.lax.cond(ctx.replica_id_in_sync_group == 0, make_a, make_b) in place of "
                "`if ctx.replica_id_in_sync_group == 0:`. All replicas run one program, which is traced once and for all of "
                "them. variable.assign(value) outside of strategy.run sets a variable on all replicas; "
                "aggregation='only_first_replica' takes replica 0's value."
            )
        line, rest = next(texts for kind, texts in _INSTEAD.items() if isinstance(error, kind))
        return OneProgramError(f"Python needed the value of an array, at {where}. Write\n    {line}\n{rest} {_NO_VALUE}")
    if isinstance(error, UnboundLocalError):
        return UnboundLocalError(
            f"{error}, at {where}. Python takes a name for local that the function assigns, as `w -= x` does. To change a "
            "variable, write w.assign_sub(x), w.assign_add(x) or w.assign(value).",
            name=error.name,
        )
    if complaint == "no axis":
        return NameError(_axis_message(name, where))
    if complaint == "no attribute" and name in _NOT_OF_ARRAYS:
        return AttributeError(f"an array has no attribute {name!r}, at {where}. {_NOT_OF_ARRAYS[name]}")
    if complaint == "array in a format":
        return OneProgramError(f"Python was to write an array in a format, at {where}. {_NO_VALUE}")
    if complaint == "no rows to divide by":
        return ValueError(
            f"an array without elements was given a shape with -1, at {where}, and JAX cannot tell what -1 is there. Write "
            "x.reshape(x.shape[0], math.prod(x.shape[1:])), with the size's name, in place of x.reshape(x.shape[0], -1)."
        )
    if complaint in _WRONG_TYPES:
        return TypeError(_WRONG_TYPES[complaint].format(where))
    return None


def _axis_message(axis: str, where: str) -> str:
    if axis == REPLICA_AXIS:
        return (
            f"a collective over the axis {axis!r} was used outside strategy.run, at {where}. The replicas are there inside "
            "a step only: outside, strategy.reduce('mean', value) combines their values."
        )
    return (
        f"there is no axis {axis!r}, at {where}. The axis of the replicas is called {REPLICA_AXIS!r}: write "
        f"jax.lax.pmean(x, {REPLICA_AXIS!r}), and axis_name={REPLICA_AXIS!r} for the layers of a model library; or "
        "mr.get_replica_context().all_reduce('mean', x). jax.vmap(..., axis_name=...) makes an axis of another name."
    )
