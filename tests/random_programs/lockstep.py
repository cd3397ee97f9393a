"""Runs a traced program in NumPy, its replicas in lockstep, one equation after the other: XLA compiles nothing.

Compiling takes two thirds of a random program's time, and what is tested is what `mirrored` makes of a step, not XLA. `patched`
puts `jit` in the place of `jax.jit` where `mirrored` compiles programs. A value that is the same on all replicas is computed
once; of what leaves a step as such, the copies must be equal bit by bit.
"""

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import scipy.special
from jax.sharding import NamedSharding, PartitionSpec
from random_programs import keys

import mirrored._program.program
from mirrored._jax import jaxprs, tracing
from mirrored._jax.primitives import HOST_CALLBACKS


class Each(list[Any]):
    """The values of the replicas."""


class Diverged(AssertionError):
    """A value leaves a step as the same on all replicas, and is not."""


#: Kinds of values that NumPy has; to ask whether one is a `jax.Array` takes longer.
_OF_NUMPY = (np.ndarray, np.generic)
_BFLOAT16 = np.dtype(jax.numpy.bfloat16)


# -- primitives


def _wide(x: Any) -> Any:
    """Return numbers of 16 bits as numbers of 32, in which XLA computes too."""
    return x if x.dtype.kind != "V" and x.dtype != _BFLOAT16 else x.astype(np.float32)


def _dot(x: Any, y: Any, p: dict[str, Any]) -> Any:
    return np.einsum(_letters(p["dimension_numbers"], x.ndim, y.ndim), _wide(x), _wide(y))


@functools.cache
def _letters(dimension_numbers: Any, ndim_x: int, ndim_y: int) -> str:
    (contract, batch), letters = dimension_numbers, iter("abcdefghijklmnop")
    of_x: list[str] = [next(letters) for _ in range(ndim_x)]
    of_y: list[str] = [next(letters) for _ in range(ndim_y)]
    for mine, yours in (contract, batch):
        for i, k in zip(mine, yours, strict=True):
            of_y[k] = of_x[i]
    rest = [a for i, a in enumerate(of_x) if i not in contract[0] and i not in batch[0]]
    rest += [a for k, a in enumerate(of_y) if k not in contract[1] and k not in batch[1]]
    out = "".join([of_x[i] for i in batch[0]] + rest)
    return f"{''.join(of_x)},{''.join(of_y)}->{out}"


def _broadcast(x: Any, p: dict[str, Any]) -> Any:
    shape = [1] * len(p["shape"])
    for axis, size in zip(p["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), p["shape"])


def _reshape(x: Any, p: dict[str, Any]) -> Any:
    return (np.transpose(x, p["dimensions"]) if p["dimensions"] else x).reshape(p["new_sizes"])


def _iota(p: dict[str, Any]) -> Any:
    numbers = np.arange(p["shape"][p["dimension"]], dtype=p["dtype"])
    return _broadcast(numbers, {"shape": p["shape"], "broadcast_dimensions": [p["dimension"]]})


def _shift_right(x: Any, by: Any) -> Any:
    unsigned = f"u{x.itemsize}"
    return (x.view(unsigned) >> by.view(unsigned)).view(x.dtype)


def _divide(x: Any, y: Any, p: dict[str, Any]) -> Any:
    return x / y if x.dtype.kind != "i" and x.dtype.kind != "u" else np.trunc(np.float64(x) / np.float64(y))


def _select(which: Any, *cases: Any) -> Any:
    cases = cases[:-1]  # the parameters
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _slice(x: Any, p: dict[str, Any]) -> Any:
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _starts(x: Any, starts: Any, sizes: Any) -> Any:
    first = [max(0, min(int(s), n - k)) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(a, a + k) for a, k in zip(first, sizes, strict=True))


def _dynamic_slice(x: Any, *rest: Any) -> Any:
    return x[_starts(x, rest[:-1], rest[-1]["slice_sizes"])]


def _dynamic_update_slice(x: Any, new: Any, *rest: Any) -> Any:
    x = np.array(x)
    x[_starts(x, rest[:-1], new.shape)] = new
    return x


def _pad(x: Any, value: Any, p: dict[str, Any]) -> Any:
    shape = [
        low + high + n + max(0, n - 1) * between for n, (low, high, between) in zip(x.shape, p["padding_config"], strict=True)
    ]
    cut = tuple(
        slice(max(0, -low), n + min(0, high)) for n, (low, high, between) in zip(x.shape, p["padding_config"], strict=True)
    )
    if any(between and (low < 0 or high < 0) for low, high, between in p["padding_config"]):
        raise NotImplementedError("padding between elements that also cuts")
    y, x = np.full(shape, value), x[cut]
    steps = [(max(0, low), between + 1) for low, _, between in p["padding_config"]]
    y[tuple(slice(low, low + n * step, step) for n, (low, step) in zip(x.shape, steps, strict=True))] = x
    return y


def _places(
    indices: Any, sizes: Any, shape: Any, ndim: int, windows: Any, removed: Any, axes: Any, batched: Any, mode: Any
) -> Any:
    """Return for each axis of an array of this shape where windows lie, whose axes in the result are `windows`; and which do."""
    rest = [axis for axis in range(ndim) if axis not in windows]

    def along(values: Any, own: Any) -> Any:
        return np.reshape(values, [np.shape(values)[own.index(axis)] if axis in own else 1 for axis in range(ndim)])

    starts = {axis: indices[..., k] for k, axis in enumerate(axes)}
    for axis, k in batched:
        numbers = np.arange(indices.shape[k]).reshape([-1 if k == i else 1 for i in range(indices.ndim - 1)])
        starts[axis] = np.broadcast_to(numbers, indices.shape[:-1])
    places, are_inside, windows = [], np.ones(indices.shape[:-1], bool), iter(windows)
    for axis, size in enumerate(shape):
        start = np.asarray(starts.get(axis, np.zeros(indices.shape[:-1], int)), np.int64)
        if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            are_inside &= (start >= 0) & (start <= size - sizes[axis])
        place = along(np.clip(start, 0, size - sizes[axis]), rest)
        places.append(place if axis in removed else place + along(np.arange(sizes[axis]), [next(windows)]))
    return tuple(np.broadcast_arrays(*places)), along(are_inside, rest)


def _gather(x: Any, indices: Any, p: dict[str, Any]) -> Any:
    d = p["dimension_numbers"]
    ndim = indices.ndim - 1 + len(d.offset_dims)
    removed = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    batched = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
    sizes, axes, mode = p["slice_sizes"], d.start_index_map, p["mode"]
    places, are_inside = _places(indices, sizes, x.shape, ndim, d.offset_dims, removed, axes, batched, mode)
    if p["fill_value"] is not None and not are_inside.all():
        return np.where(are_inside, x[places], p["fill_value"])
    outside = np.nan if x.dtype.kind not in "iub" else np.iinfo(x.dtype).min if x.dtype.kind == "i" else -1 % 2**32
    return x[places] if are_inside.all() else np.where(are_inside, x[places], outside)


def _scattered(set_at: Callable[..., None]) -> Callable[..., Any]:
    def run(x: Any, indices: Any, updates: Any, p: dict[str, Any]) -> Any:
        d = p["dimension_numbers"]
        removed = (*d.inserted_window_dims, *d.operand_batching_dims)
        window = iter(d.update_window_dims)
        sizes = [1 if axis in removed else updates.shape[next(window)] for axis in range(x.ndim)]
        batched = zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True)
        axes, mode = d.scatter_dims_to_operand_dims, p["mode"]
        places, inside = _places(indices, sizes, x.shape, updates.ndim, d.update_window_dims, removed, axes, batched, mode)
        inside, result = np.broadcast_to(inside, updates.shape), np.array(x)
        set_at(result, tuple(np.broadcast_to(place, updates.shape)[inside] for place in places), updates[inside])
        return result

    return run


def _split(x: Any, p: dict[str, Any]) -> list[Any]:
    return np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"])


def _cumulated(function: Any) -> Callable[..., Any]:
    def run(x: Any, p: dict[str, Any]) -> Any:
        return (
            np.flip(function(np.flip(x, p["axis"]), axis=p["axis"]), p["axis"]) if p["reverse"] else function(x, axis=p["axis"])
        )

    return run


def _sort(*operands: Any) -> Any:
    *arrays, p = operands
    if p["num_keys"] != 1:
        raise NotImplementedError("several keys")
    order = np.argsort(arrays[0], axis=p["dimension"], kind="stable")
    return [np.take_along_axis(a, order, p["dimension"]) for a in arrays]


def _reduced(function: Any, empty: Any = None) -> Callable[..., Any]:
    def run(x: Any, p: dict[str, Any]) -> Any:
        start = {} if empty is None or x.dtype == bool else {"initial": empty(x.dtype)}
        return function(_wide(x), axis=tuple(p["axes"]), **start)

    return run


def _lowest(dtype: Any) -> Any:
    return -np.inf if np.dtype(dtype).kind not in "iu" else np.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return np.inf if np.dtype(dtype).kind not in "iu" else np.iinfo(dtype).max


def _top_k(x: Any, p: dict[str, Any]) -> Any:
    numbers = x.astype(np.int64) if x.dtype.kind in "iub" else _wide(x)
    order = np.take(np.argsort(-numbers, axis=p["axis"], kind="stable"), range(p["k"]), p["axis"])
    return [np.take_along_axis(x, order, p["axis"]), order]


def _search(*operands: Any) -> Any:
    *arrays, p = operands
    if type(p["_prim"]).__name__ != "SearchSorted" or arrays[0].ndim > 1:
        raise NotImplementedError("a primitive without a name of its own")
    return [np.searchsorted(*arrays, p["_prim"].side)]


def _conv(x: Any, kernel: Any, p: dict[str, Any]) -> Any:
    """Convolve: each window of rows [group, row, channel, ...] with the kernels of its group."""
    of_x, of_kernel, of_result = p["dimension_numbers"]
    x, kernel = (np.transpose(_wide(a), spec) for a, spec in ((x, of_x), (kernel, of_kernel)))
    zero, around = x.dtype.type(0), [(0, 0, 0)] * 2
    x = _pad(x, zero, {"padding_config": around + [(0, 0, n - 1) for n in p["lhs_dilation"]]})
    x = _pad(x, zero, {"padding_config": around + [(*pads, 0) for pads in p["padding"]]})
    kernel = _pad(kernel, zero, {"padding_config": around + [(0, 0, n - 1) for n in p["rhs_dilation"]]})
    axes = tuple(range(2, x.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axes)
    windows = windows[(slice(None), slice(None), *(slice(None, None, step) for step in p["window_strides"]))]
    of_rows, of_channels = p["batch_group_count"], p["feature_group_count"]
    windows = np.stack(np.split(windows, of_rows, 0)) if of_rows > 1 else np.stack(np.split(windows, of_channels, 1))
    kernels = np.stack(np.split(kernel, max(of_rows, of_channels), 0))
    space, inside = "uvw"[: len(axes)], "xyz"[: len(axes)]
    result = np.einsum(f"gnc{space}{inside},goc{inside}->ngo{space}", windows, kernels, optimize=True)
    result = result.reshape(result.shape[0], result.shape[1] * result.shape[2], *result.shape[3:])
    return np.transpose(result, np.argsort(of_result))


def _same(*operands: Any) -> Any:
    return list(operands[:-1])


def _plain(function: Any) -> Callable[..., Any]:
    """Return a rule for a primitive without parameters that count."""
    return lambda *operands: function(*operands[:-1])


_ELEMENTWISE = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum,
    "min": np.minimum, "abs": np.abs, "sign": np.sign, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log,
    "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "floor": np.floor, "ceil": np.ceil, "pow": np.power, "rem": np.fmod, "is_finite": np.isfinite, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "one_minus_square": lambda x: 1 - x * x,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "shift_left": np.left_shift, "shift_right_logical": _shift_right, "real": np.real, "imag": np.imag,
    "complex": lambda x, y: x + 1j * y, "nextafter": np.nextafter, "erf": scipy.special.erf, "erf_inv": scipy.special.erfinv,
}  # fmt: skip
RULES: dict[str, Callable[..., Any]] = {
    **{name: _plain(function) for name, function in _ELEMENTWISE.items()},
    "div": _divide, "select_n": _select, "dot_general": _dot, "broadcast_in_dim": _broadcast, "slice": _slice, "pad": _pad,
    "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice, "split": _split, "sort": _sort,
    "integer_pow": lambda x, p: x ** x.dtype.type(p["y"]) if p["y"] >= 0 else 1 / x ** x.dtype.type(-p["y"]),
    "convert_element_type": lambda x, p: x.astype(p["new_dtype"]), "reshape": _reshape,
    "squeeze": lambda x, p: np.squeeze(x, tuple(p["dimensions"])), "transpose": lambda x, p: np.transpose(x, p["permutation"]),
    "rev": lambda x, p: np.flip(x, p["dimensions"]), "concatenate": lambda *a: np.concatenate(a[:-1], a[-1]["dimension"]),
    "iota": _iota,
    "reduce_sum": _reduced(np.sum), "reduce_prod": _reduced(np.prod), "reduce_max": _reduced(np.max, _lowest),
    "reduce_min": _reduced(np.min, _highest), "reduce_or": _reduced(np.any), "reduce_and": _reduced(np.all),
    "argmax": lambda x, p: np.argmax(x, p["axes"][0]), "argmin": lambda x, p: np.argmin(x, p["axes"][0]),
    "cumsum": _cumulated(np.cumsum), "cummax": _cumulated(np.maximum.accumulate), "cumprod": _cumulated(np.cumprod),
    "bitcast_convert_type": lambda x, p: x.view(p["new_dtype"]),
    "optimization_barrier": _same, "mirrored_mark": _same, "stop_gradient": _same, "copy": _same, "name": _same,
    "psum": lambda *a: [np.sum(x, a[-1]["axes"]) for x in a[:-1]],
    "gather": _gather, "scatter-add": _scattered(np.add.at), "scatter": _scattered(operator.setitem),
    "top_k": _top_k, "call_hi_primitive": _search, "conv_general_dilated": _conv, **keys.RULES,
    "stack": lambda *a: np.stack(a[:-1], a[-1]["axis"]),
    "unstack": lambda x, p: [np.take(x, i, p["axis"]) for i in range(x.shape[p["axis"]])],
}  # fmt: skip


def _collective(name: str, values: list[Any], p: dict[str, Any]) -> Any:
    """Return what each replica, or all, get of the values of all."""
    if p.get("axis_index_groups") is not None:
        raise NotImplementedError("groups of replicas")
    if name in ("psum", "pmax", "pmin"):
        function = {"psum": np.add, "pmax": np.maximum, "pmin": np.minimum}[name]
        own = tuple(axis for axis in p["axes"] if isinstance(axis, int))  # of a `vmap`
        return functools.reduce(function, [function.reduce(value, own, dtype=value.dtype) for value in values])
    if name == "all_gather":
        axis = p["all_gather_dimension"]
        return np.concatenate(values, axis) if p["tiled"] else np.stack(values, axis)
    if name == "reduce_scatter":
        axis = p["scatter_dimension"]
        total = functools.reduce(np.add, values)
        parts = np.split(total, len(values), axis)
        return Each(parts if p["tiled"] else [np.squeeze(part, axis) for part in parts])
    if name == "ppermute":
        sent = {to: values[from_] for from_, to in p["perm"]}
        return Each(sent.get(i, np.zeros_like(values[0])) for i in range(len(values)))
    if name == "all_to_all":
        parts = [np.split(value, len(values), p["split_axis"]) for value in values]
        return Each(np.concatenate(own, p["concat_axis"]) for own in zip(*parts, strict=True))
    raise NotImplementedError(name)


COLLECTIVES = {"psum", "pmax", "pmin", "all_gather", "reduce_scatter", "ppermute", "all_to_all"}
_CALLS = {"jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "remat2", "checkpoint"}


# -- programs


class Lockstep:
    """So many replicas, or some of them: each by its number."""

    def __init__(self, numbers: tuple[int, ...], of: int) -> None:
        self.numbers, self.of = numbers, of

    def run(self, jaxpr: Any, consts: Any, values: Any) -> list[Any]:
        known = dict(zip(jaxpr.invars, values, strict=True))
        known.update(zip(jaxpr.constvars, map(_host, consts), strict=True))
        for equation in jaxpr.eqns:
            operands = [np.asarray(a.val, a.aval.dtype) if isinstance(a, jaxprs.Literal) else known[a] for a in equation.invars]
            for variable, result in zip(equation.outvars, self.equation(equation, operands), strict=True):
                known[variable] = result
        return [np.asarray(a.val, a.aval.dtype) if isinstance(a, jaxprs.Literal) else known[a] for a in jaxpr.outvars]

    def closed(self, closed: Any, values: Any) -> list[Any]:
        return self.run(closed.jaxpr, closed.consts, values)

    def equation(self, equation: Any, values: list[Any]) -> Any:
        name, p = equation.primitive.name, equation.params
        if name == "shard_map":
            return _mapped(p, values)
        if name in _CALLS:
            [inner] = jaxprs.inner_jaxprs(equation)
            return self.closed(inner, values)
        if name == "axis_index":
            return [Each(np.int32(number) for number in self.numbers)]
        if name in COLLECTIVES and any(isinstance(axis, str) for axis in jaxprs.axis_names(equation)):  # else of a `vmap` only
            if len(self.numbers) != self.of:
                raise NotImplementedError(f"{name} where the replicas do not go the same way")
            return [_collective(name, self.each(value), p) for value in values]
        if name in ("scan", "while", "cond", "custom_linear_solve"):
            return getattr(self, f"_{name}")(equation, values)
        if not any(isinstance(value, Each) for value in values) and (self.of == 1 or name not in HOST_CALLBACKS):
            return _bind(equation, values)
        own = ([self.each(value)[i] for value in values] for i in range(len(self.numbers)))
        return [Each(results) for results in zip(*(_bind(equation, operands) for operands in own), strict=True)]

    def each(self, value: Any) -> list[Any]:
        return value if isinstance(value, Each) else [value] * len(self.numbers)

    def alone(self, function: Callable[["Lockstep", list[Any]], Any], values: list[Any]) -> list[Any]:
        """Let each replica go its own way."""
        results = [
            function(Lockstep((number,), self.of), [v[i] if isinstance(v, Each) else v for v in values])
            for i, number in enumerate(self.numbers)
        ]
        flat = [[r[0] if isinstance(r, Each) else r for r in own] for own in results]
        return [Each(own) for own in zip(*flat, strict=True)]

    def _cond(self, equation: Any, values: list[Any]) -> list[Any]:
        which, *operands = values
        if isinstance(which, Each) and len(which) > 1:
            return self.alone(lambda one, values: one._cond(equation, values), values)
        index = int(which[0] if isinstance(which, Each) else which)
        branches = equation.params["branches"]
        return self.closed(branches[max(0, min(index, len(branches) - 1))], operands)

    def _custom_linear_solve(self, equation: Any, values: list[Any]) -> list[Any]:
        lengths = equation.params["const_lengths"]
        first, rest = lengths.matvec + lengths.vecmat, sum(lengths)
        return self.closed(equation.params["jaxprs"].solve, [*values[first : first + lengths.solve], *values[rest:]])

    def _while(self, equation: Any, values: list[Any]) -> list[Any]:
        loop = jaxprs.loop_of(equation)
        decide, body = loop.parts
        fixed, carry = values[: loop.carry.start], values[loop.carry.start :]
        while True:
            [again] = self.closed(decide.closed, [*(fixed[k] for k in decide.fixed), *carry])
            if isinstance(again, Each) and len(again) > 1:
                return self.alone(lambda one, values: one._while(equation, values), [*fixed, *carry])
            again = again[0] if isinstance(again, Each) else again
            if not np.any(again):
                return carry
            new = self.closed(body.closed, [*(fixed[k] for k in body.fixed), *carry])
            carry = [_rows_that_go_on(again, *pair) for pair in zip(new, carry, strict=True)] if np.ndim(again) else new

    def _scan(self, equation: Any, values: list[Any]) -> list[Any]:
        loop, length, outputs = jaxprs.loop_of(equation), equation.params["length"], {}
        [body] = loop.parts
        fixed, carry = values[: loop.carry.start], [values[k] for k in loop.carry]
        for i in range(length)[:: -1 if equation.params["reverse"] else 1]:
            rows = [Each(own[i] for own in v) if isinstance(v, Each) else v[i] for v in (values[k] for k in loop.rows)]
            results = self.closed(body.closed, [*fixed, *carry, *rows])
            carry, outputs[i] = results[: len(carry)], results[len(carry) :]
        if not length:
            return [*carry, *(np.zeros(v.aval.shape, keys.dtype_in_numpy(v.aval.dtype)) for v in equation.outvars[len(carry) :])]
        return [*carry, *map(self._stacked, zip(*(outputs[i] for i in range(length)), strict=True))]

    def _stacked(self, ys: Any) -> Any:
        if any(isinstance(y, Each) for y in ys):
            return Each(_stack(own) for own in zip(*map(self.each, ys), strict=True))
        return _stack(ys)


def _rows_that_go_on(again: Any, *new_and_old: Any) -> Any:
    """Choose, in a mapped loop, the new values of the rows that go on, and the old ones of those that have ended."""
    new, old = (value[0] if isinstance(value, Each) else value for value in new_and_old)
    return np.where(again.reshape(again.shape + (1,) * (np.ndim(new) - again.ndim)), new, old)


def _stack(ys: Any) -> Any:
    return jax.numpy.stack(ys) if isinstance(ys[0], jax.Array) else np.stack(ys)


def _bind(equation: Any, operands: Any) -> Any:
    """Compute an equation in NumPy, or let XLA do so."""
    rule, dtypes = RULES.get(equation.primitive.name), [keys.dtype_in_numpy(v.aval.dtype) for v in equation.outvars]
    if equation.primitive.name == "empty2" and None not in dtypes:
        [shape], [dtype] = (v.aval.shape for v in equation.outvars), dtypes
        return [np.full(shape, np.nan if dtype.kind not in "iub" else 77, dtype)]
    if rule is not None and None not in dtypes and all(isinstance(value, _OF_NUMPY) for value in operands):
        with contextlib.suppress(NotImplementedError):
            results = rule(*operands, equation.params)
            results = results if isinstance(results, list) else [results]
            return [np.asarray(r, dtype) for r, dtype in zip(results, dtypes, strict=True)]
    return list(map(_host, tracing.bind(equation, list(map(_of_jax, operands, equation.invars)))))


def _of_jax(value: Any, variable: Any) -> Any:
    """Return what XLA takes for the value of a variable: keys are numbers in NumPy."""
    is_number = isinstance(value, _OF_NUMPY) and jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key)
    return keys.as_jax(value) if is_number else value


def _host(array: Any) -> Any:
    """Return an array on the host, unless it holds keys of an unusual generator."""
    if isinstance(array, _OF_NUMPY):
        return array
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array if keys.dtype_in_numpy(array.dtype) is None else keys.as_numbers(jax.random.key_data(array))
    return np.asarray(array)


def _axis_of(spec: PartitionSpec) -> int | None:
    return next((axis for axis, name in enumerate(spec) if name), None)


def _mapped(p: dict[str, Any], values: list[Any]) -> list[Any]:
    """Run a `shard_map`: what has an axis of the replicas is split, and put together again."""
    count = p["mesh"].size
    inputs = []
    for value, spec in zip(values, p["in_specs"], strict=True):
        axis = _axis_of(spec)
        inputs.append(value if axis is None else Each(_parts(value, count, axis)))
    outputs = Lockstep(tuple(range(count)), count).run(p["jaxpr"], (), inputs)
    results = []
    for number, (output, spec) in enumerate(zip(outputs, p["out_specs"], strict=True)):
        axis = _axis_of(spec)
        if axis is not None:
            every = output if isinstance(output, Each) else [output] * count
            results.append(jax.numpy.concatenate(every, axis) if isinstance(every[0], jax.Array) else np.concatenate(every, axis))
            continue
        if isinstance(output, Each):
            for own in output[1:]:
                if np.asarray(own).tobytes() != np.asarray(output[0]).tobytes():
                    raise Diverged(f"output {number} is {output}")
            output = output[0]
        results.append(output)
    return results


def _parts(value: Any, count: int, axis: int) -> list[Any]:
    return (jax.numpy.split if isinstance(value, jax.Array) else np.split)(value, count, axis)


# -- in the place of jax.jit

_LEFT_TO_XLA = {"get", "swap", "addupdate"}


class jit:
    """A function that is traced once for arguments of each shape, and computed by `Lockstep`; XLA has what that cannot."""

    def __init__(
        self, function: Callable[..., Any], donate_argnums: Any = (), out_shardings: Any = None, compiler_options: Any = None
    ) -> None:
        self.function, self.out_shardings = function, out_shardings
        self.__name__ = getattr(function, "__name__", "function")
        self.traced: dict[Any, Any] = {}
        self.compiled = jax.jit(function, **({} if out_shardings is None else {"out_shardings": out_shardings}))

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.computed(arguments)
        except NotImplementedError:
            return self.compiled(*arguments)

    def computed(self, arguments: Any) -> Any:
        flat, structure = jax.tree.flatten(arguments)
        key = structure, *(jax.typeof(leaf) for leaf in flat)
        if key not in self.traced:
            closed, shapes = jax.make_jaxpr(self.function, return_shape=True)(*arguments)
            self.traced[key] = closed, jax.tree.structure(shapes)
        closed, out = self.traced[key]
        if left := _LEFT_TO_XLA & {equation.primitive.name for equation in jaxprs.all_equations(closed.jaxpr)}:
            raise NotImplementedError(", ".join(left))
        with np.errstate(all="ignore"):
            results = Lockstep((0,), 1).closed(closed, list(map(_host, flat)))
        results = list(map(_of_jax, results, closed.jaxpr.outvars))
        return jax.tree.unflatten(out, self.placed(closed, out, results))

    def placed(self, closed: Any, out: Any, results: list[Any]) -> list[Any]:
        """Put results where the compiled program leaves them."""
        if self.out_shardings is not None:
            shardings = jax.tree.broadcast(
                self.out_shardings, jax.tree.unflatten(out, results), lambda s: isinstance(s, NamedSharding)
            )
            return jax.device_put(results, jax.tree.leaves(shardings, is_leaf=lambda s: isinstance(s, NamedSharding)))
        made = {
            v: (e.params["mesh"], s)
            for e in closed.jaxpr.eqns
            if e.primitive.name == "shard_map"
            for v, s in zip(e.outvars, e.params["out_specs"], strict=True)
        }
        places = [made.get(variable) if not hasattr(variable, "val") else None for variable in closed.jaxpr.outvars]
        if not made:
            return results
        mesh = next(iter(made.values()))[0]
        return jax.device_put(
            results, [NamedSharding(mesh, PartitionSpec()) if place is None else NamedSharding(*place) for place in places]
        )


@contextlib.contextmanager
def computed() -> Iterator[None]:
    """Let programs of `mirrored` be computed by `Lockstep`, and not compiled."""

    class Jax(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(jax, name)

    module: Any = Jax("jax")
    module.jit = jit
    with mock.patch.object(mirrored._program.program, "jax", module):
        yield


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Compute programs so, and let their traces share JAX's inner caches.

    What a random program has inside of loops, calls and derivatives is made anew in each trace; else a cached one could hold
    another trace's variables (`tracing.separate_caches`).
    """
    with computed(), mock.patch.object(tracing, "separate_caches", lambda: contextlib.nullcontext(lambda: None)):
        yield
