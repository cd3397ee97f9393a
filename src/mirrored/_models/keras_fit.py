"""Keras' own `fit`, `evaluate` and `predict` on all devices of a strategy.

Keras compiles a function of the global batch, and XLA divides the computation as the batch is placed. So results are those of
one device, and normalization is over the global batch. We only place variables and batches.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._errors import PlanError, StrategyMismatchError
from .._jax import user_code
from .._process import library_models
from .._replicas import cross_replica, in_flight, placement
from .._replicas.mesh import PlannedMesh, ReplicaMesh, replicas_of
from .._replicas.per_replica import PerReplica, is_per_replica, stack_of, uneven_shapes
from .._text import numbered
from .._typing import PyTree
from .._variables.variable import spec_of
from ..data._dataset import DistributedDataset, mesh_of
from . import keras_parts
from .keras_variables import adopt, ours_of, scope_mesh
from .replaced import in_place

if TYPE_CHECKING:
    import keras


def describe(mesh: ReplicaMesh) -> list[str]:
    """Name the models for which Keras has run `fit`, `evaluate` or `predict` on these devices."""
    models = [model for model, devices in list(library_models.items()) if devices == mesh]
    names = [m.name for m in models if _OnAll in map(type, (m.train_function, m.test_function, m.predict_function))]
    how = "share each batch out over all replicas, or give it whole to each when they do not divide it"
    return [f"Keras model {name!r}: fit, evaluate and predict {how}" for name in names]


def _mesh_of(model: keras.Model) -> ReplicaMesh | None:
    """Return the devices of a model's strategy, else of the strategy whose scope the program is in."""
    known = (spec_of(ours).mesh for ours in map(ours_of, _variables_of(model)) if ours is not None)
    mesh = next(known, library_models.get(model))
    here = scope_mesh()
    if mesh is not None and here is not None and mesh != here:
        raise StrategyMismatchError(
            f"the Keras model {model.name!r} lives on {mesh}, but this is the scope of a strategy on {here}. Leave the scope, or "
            "make the model in it."
        )
    return mesh or here


def _variables_of(model: keras.Model) -> list[Any]:
    variables = [*model.variables, *model.metrics_variables]
    if (optimizer := getattr(model, "optimizer", None)) is not None:
        variables += optimizer.variables
    return variables


# -- the models of a strategy


def init_model(old: Callable[..., None], model: keras.Model, *args: object, **kwargs: object) -> None:
    """Make a model; if it is made in a scope, it still belongs to the strategy after the scope."""
    if (mesh := scope_mesh()) is not None:
        library_models[model] = mesh
        _know(model)
    old(model, *args, **kwargs)


def _know(model: keras.Model) -> None:
    """Wrap a model's methods: while they run, our methods replace Keras'. So the model trains outside the scope too."""
    for name in METHODS:
        method = functools.partial(_call_in_place, model, name)
        model.__dict__.setdefault(name, functools.update_wrapper(method, getattr(model, name)))


def _call_in_place(model: keras.Model, name: str, *args: object, **kwargs: object) -> Any:
    with in_place():
        return getattr(type(model), name)(model, *args, **kwargs)


# -- the functions that Keras compiles


def _make_function(old: Callable[..., Any], model: keras.Model, force: bool = False) -> Callable[..., Any] | None:
    """Make the function that `fit` calls with the state and the batches; it places both on all devices."""
    mesh = _mesh_of(model)
    if mesh is None:
        return old(model, force)
    if isinstance(mesh, PlannedMesh):
        raise PlanError(
            f"{model.name}: fit, evaluate and predict cannot be planned, because Keras compiles and runs their programs itself. "
            "Plan a step of your own: strategy.run(step), with mr.value_and_grad and model(x, training=True)."
        )
    for variable in _variables_of(model):  # some were made outside the scope, such as an optimizer's slots
        adopt(variable, mesh)
    name = old.__name__.removeprefix("make_")
    known = getattr(model, name)
    if force or not isinstance(known, _OnAll) or known.mesh != mesh:
        with _distribution(mesh).scope():  # so that Keras asks for this placement of the new state
            old(model, True)
        setattr(model, name, _OnAll(mesh, getattr(model, name), name.removesuffix("_function")))
        library_models[model] = mesh
    _know(model)  # it may have been made elsewhere; from now on it belongs to the strategy
    return getattr(model, name)


@dataclasses.dataclass(eq=False)
class _OnAll:
    """A function that Keras has compiled, of the state and an iterator of batches; it places the batches on all devices."""

    mesh: ReplicaMesh
    _function: Callable[..., Any]
    _kind: str
    _is_new: bool = True

    def __call__(self, state: PyTree, iterator: Iterator[Any]) -> Any:
        in_flight.require_threads()
        results, state = self._function(state, map(self._placed, iterator))
        if self._kind == "predict":  # Keras makes numpy arrays of the predictions
            leaves, treedef = jax.tree.flatten(results)
            results = treedef.unflatten(placement.mirror(self.mesh, leaves))
        if in_flight.is_paced(self.mesh.mirrored):
            witness = next((leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)), None)
            if witness is None:
                jax.block_until_ready(state)
            elif self.mesh.is_alone:
                in_flight.started(witness)
            else:
                in_flight.joined(witness)
        return results, state

    def _placed(self, batch: PyTree) -> PyTree:
        arrays, treedef = jax.tree.flatten(batch)
        if self._is_new and self._kind == "train":
            sizes, count = {array.shape[0] for array in arrays if array.ndim}, self.mesh.num_replicas
            if any(size % count for size in sizes):
                user_code.warn(
                    f"model.fit gets batches of {', '.join(map(str, sorted(sizes)))} rows for {count} replicas. Keras' programs "
                    "share a batch out only when the replicas divide it; now each replica computes the whole batch: the numbers "
                    f"are right, and it is no faster than one device. Use a multiple of {count} as the batch size."
                )
        self._is_new = False
        if not self.mesh.is_alone and (whole := list(filter(_is_own, arrays))):  # each worker passes the same global batch
            sums = np.array([placement.checksum(np.asarray(array)) for array in whole], np.uint32)
            placement.mirror(self.mesh, [sums], _refuse_batch, is_checked_late=True)
        return treedef.unflatten(_place(self.mesh, arrays))


@functools.cache
def _distribution(mesh: ReplicaMesh) -> Any:
    keras: Any = keras_parts.imported_keras()
    devices = keras.distribution.DeviceMesh((len(mesh.devices),), [mesh.axis], list(mesh.devices))
    return keras.distribution.DataParallel(device_mesh=devices, auto_shard_dataset=False)


# -- the placement of batches


def _place(mesh: ReplicaMesh, arrays: list[jax.Array | np.ndarray]) -> Sequence[jax.Array | np.ndarray]:
    """Divide a batch's rows among the devices; if that is not even, give each device all rows (the numbers stay exact)."""
    if mesh.mirrored.num_devices == 1 and {np.ndarray}.issuperset(map(type, arrays)):
        return arrays  # for one device, the program itself places them faster
    is_divided = [array.ndim and array.shape[0] and array.shape[0] % mesh.num_replicas == 0 for array in arrays]
    targets = [mesh.stacked if divided else mesh.mirrored for divided in is_divided]
    if mesh.is_alone:
        return mesh.put(arrays, targets)
    make = jax.make_array_from_callback
    pairs = zip(arrays, targets, strict=True)
    return [make(a.shape, to, np.asarray(a).__getitem__) if _is_own(a) else mesh.put(a, to) for a, to in pairs]


def _is_own(array: jax.Array | np.ndarray) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _refuse_batch(position: int, workers: Sequence[int]) -> None:
    raise StrategyMismatchError(
        f"{numbered(workers)} gave model.fit (or evaluate, predict) another batch than worker 0. With several workers each "
        "passes the same global batches, of which it uses its own rows: seed what shuffles them alike, by "
        "keras.utils.set_random_seed(0), or pass strategy.distribute_dataset(dataset)."
    )


# -- distributed datasets


def _build_quietly(old: Callable[..., None], model: keras.Model, *args: object, **kwargs: object) -> None:
    """Build a model, without JAX's warning that int64 labels become int32."""
    with warnings.catch_warnings():
        if _mesh_of(model) is not None:
            warnings.filterwarnings("ignore", "Explicitly requested dtype u?int64", UserWarning)
        old(model, *args, **kwargs)


def _with_dataset(old: Callable[..., Any], model: keras.Model, x: object = None, *args: object, **kwargs: object) -> Any:
    """Call `fit`, `evaluate` or `predict`; accept distributed datasets, and shuffle alike on all workers."""
    mesh = _mesh_of(model)
    if isinstance(x, DistributedDataset):
        unused = [name for name in ("y", "sample_weight", "class_weight", "validation_split") if not _is_unset(kwargs.get(name))]
        if unused or args:
            advice = "Pass other arguments by their names."
            if "class_weight" in unused:
                advice = (
                    "Weights of classes are its third element: dataset.map(lambda x, y: (x, y, weights[y])), with a NumPy array "
                    "of one weight for each class, for labels that are numbers of classes."
                )
            raise ValueError(
                f"{old.__name__} got a distributed dataset and {' and '.join(unused) or 'positional arguments'}; expected the "
                f"dataset alone, which yields (x, y) or (x, y, sample_weight). {advice}"
            )
        x = _adapted(x, mesh, model, old.__name__)
    if isinstance(kwargs.get("validation_data"), DistributedDataset):
        kwargs["validation_data"] = _adapted(kwargs["validation_data"], mesh, model, "")
    if mesh is not None and not mesh.is_alone and old.__name__ == "fit":  # Keras shuffles with numpy's random numbers
        np.random.seed(int(placement.mirror(mesh, [np.random.randint(2**31, dtype=np.int32)])[0]))
    return old(model, x, *args, **kwargs)


def _is_unset(value: object) -> bool:
    """Tell whether an argument of `fit` was left out; an array has no truth value, so `not value` cannot."""
    return value is None or (not hasattr(value, "shape") and not value)


def _adapted(dataset: DistributedDataset, mesh: ReplicaMesh | None, model: keras.Model, verb: str) -> Any:
    if mesh != mesh_of(dataset):
        home = "belongs to no strategy. Make it in `with strategy.scope():`." if mesh is None else f"lives on {mesh}."
        raise StrategyMismatchError(
            f"the dataset was distributed over {mesh_of(dataset)}, but the Keras model {model.name!r} {home}"
        )
    return keras_parts.subclass_of(keras_parts.adapter_base(), BatchAdapter)(dataset, verb)


class BatchAdapter:
    """A distributed dataset that gives Keras its batches as global arrays."""

    batch_size = partial_batch_size = None
    has_partial_batch = False

    def __init__(self, dataset: DistributedDataset, verb: str) -> None:
        self._dataset, self._verb = dataset, verb  # "" for validation, which may be left out

    @property
    def num_batches(self) -> int | None:
        """The number of batches of an epoch, or None if it is not known in advance."""
        try:
            return len(self._dataset)
        except TypeError:
            return None

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        is_empty = bool(self._verb)
        for batch in self._dataset:
            is_empty = False
            yield jax.tree.map(_joined, batch, is_leaf=is_per_replica)
        if is_empty:
            raise ValueError(f"model.{self._verb} got a dataset that makes no step. A warning before this error says why.")


def _joined(value: PerReplica) -> jax.Array:
    """Return the rows of all replicas as one array; rows of an even batch stay where they are."""
    stack, shapes = stack_of(value), uneven_shapes(value)
    mesh = replicas_of(stack.sharding.mesh)  # type: ignore[attr-defined]
    if shapes is None:
        return cross_replica.compiled(jax.lax.collapse, mesh.stacked, 0, 2)(stack)
    return cross_replica.compiled(cross_replica.gather_stack, mesh.mirrored, 0, shapes, mesh.mirrored)(stack)


#: The methods of a strategy's model that take batches.
METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("make_train_function", "make_test_function", "make_predict_function"), _make_function),
    **dict.fromkeys(("fit", "evaluate", "predict"), _with_dataset),
    keras_parts.BUILD: _build_quietly,
}
