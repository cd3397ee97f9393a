"""Stand-ins on devices that are not here: shapes in place of arrays, and programs that are compiled but never run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.sharding import NamedSharding, Sharding

from .. import _process
from .._errors import PlanError
from .._jax import topologies, user_code
from .._jax.costs import Work, work_in
from .._typing import ArrayLike, PyTree

_logger = logging.getLogger("mirrored")


def is_for_plan(placement: NamedSharding) -> bool:
    """Tell whether a placement is on a topology's devices."""
    return topologies.runs_nothing(placement.mesh.devices.flat[0])


class Planned(jax.ShapeDtypeStruct):
    """The shape, dtype and placement of an array on devices that are not here. Reading its values raises `PlanError`."""

    __slots__ = ("__weakref__",)

    is_fully_addressable = True
    committed = True

    @property
    def nbytes(self) -> int:
        """The bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Return False: nobody donates a stand-in."""
        return False

    def block_until_ready(self) -> Planned:
        """Return at once: nothing is computed."""
        return self

    def astype(self, dtype: Any) -> Planned:
        """Return the stand-in of another dtype."""
        return stand_in(jax.ShapeDtypeStruct(self.shape, dtype), self.sharding)

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        user_code.hide_lines()
        kind = f"{self.dtype}{list(self.shape)}"
        raise PlanError(
            f"the plan ends here: the program reads the values of an array {kind}, and a plan has none, because its devices "
            "exist nowhere. Write print(mr.plan(strategy)) before this line, or leave the line out of what you plan. The command "
            "`mirrored plan --topology NAME train.py` ends here by itself, and prints the plan."
        )

    def __getattr__(self, name: str) -> Any:
        if (hasattr(jax.Array, name) or name in ("tobytes", "tolist")) and not name.startswith("__"):
            self._refuse()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _computing(operation: str) -> Callable[..., Planned]:
    def compute(self: Planned, *others: ArrayLike) -> Planned:
        shape = jax.eval_shape(lambda first, *rest: getattr(first, operation)(*rest), self, *others)
        return stand_in(shape, self.sharding)

    return compute


_READING = "array jax_array float int bool complex index format iter getitem contains"
_COMPUTING = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs round lt le gt ge
"""
for _operation in _READING.split():
    setattr(Planned, f"__{_operation}__", Planned._refuse)
for _operation in _COMPUTING.split():  # such as the sum of the losses of an evaluation
    setattr(Planned, f"__{_operation}__", _computing(f"__{_operation}__"))


def stand_in(array: Any, placement: Sharding | None) -> Planned:
    """Return the stand-in for an array, a number or another stand-in, on devices that are not here."""
    kind = array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
    is_weak = bool(getattr(kind, "weak_type", False))
    dtype = jax.dtypes.canonicalize_dtype(kind.dtype, allow_extended_dtype=True)
    return Planned(kind.shape, dtype, sharding=placement, weak_type=is_weak)


class CompiledOnly:
    """A program for devices that are not here: its first call compiles it, and every call returns its results' shapes.

    Attributes:
        compiled: XLA's program; None before the first call, and if it does not fit into memory.
        arguments: the arguments of the first call.
        work: the operations of its products, and how often its loops repeat what they make, on each device.
        is_trained: whether each variable among the arguments is trained.
        failure: why XLA could not compile it; "" if it could.
        seconds: how long XLA took to compile it.
    """

    def __init__(self, program: Any, name: str, is_trained: list[bool], placements: tuple[NamedSharding, NamedSharding]) -> None:
        self._program, self.name, self.is_trained = program, name, is_trained
        self._placements = placements  # of mirrored values, and of per-replica values
        self._results: PyTree = None
        self._num_calls = 0
        self.__name__: str = program.__name__
        self.compiled: Any = None
        self.arguments: tuple[Any, ...] = ()
        self.failure, self.seconds = "", 0.0
        self.work = Work(0.0, 0.0, 0.0, 0.0)

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Return the results' shapes; `arguments` are `(written, read_only, arrays, constants)`."""
        self._num_calls += 1
        if self._results is None:
            self._compile(arguments)
        elif _process.max_planned_calls and self._num_calls > _process.max_planned_calls:
            raise PlanError(f"the plan ends here: {self.name} was called {_process.max_planned_calls} times.")
        return jax.tree.map(lambda array: array, self._results)  # new lists, because readers change them

    def _compile(self, arguments: tuple[PyTree, ...]) -> None:
        start = time.perf_counter()
        _logger.info("compiling %s for devices that are not here", self.name)
        mirrored, stacked = self._placements
        traced = self._program.trace(*arguments)
        self.work = work_in(traced.jaxpr.jaxpr)
        lowered = traced.lower()
        try:
            self.compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self.failure = str(error)
            first = [line.strip() for line in self.failure.splitlines()[:4] if line.strip()]
            raise PlanError(f"the program does not fit into the memory of a device: {' '.join(first)}") from None
        finally:
            self.arguments = jax.tree.map(lambda array: array, arguments)  # copies: the list of variables' arrays changes
            self.seconds = time.perf_counter() - start
            _logger.info("compiled %s in %.1f s", self.name, self.seconds)
        found = jax.tree.leaves(self.compiled.output_shardings)
        results, treedef = jax.tree.flatten(lowered.out_info)
        known = [mirrored if placement.is_fully_replicated else placement for placement in found]
        pairs = zip(known, results, strict=True)
        placements = [stacked if p.is_equivalent_to(stacked, max(len(r.shape), 1)) else p for p, r in pairs]
        self._results = treedef.unflatten(map(stand_in, results, placements))


def shapes_of(function: Callable[..., Any], placement: NamedSharding) -> Callable[..., Any]:
    """Make a function that returns the shapes of another function's results."""
    return lambda *arrays: jax.tree.map(lambda result: stand_in(result, placement), jax.eval_shape(function, *arrays))
