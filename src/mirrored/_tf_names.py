"""Says what to write in place of TensorFlow's and PyTorch's names that are missing or different here."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

ClassT = TypeVar("ClassT", bound=type)

#: Methods of a strategy: TensorFlow's name -> ours. They work, with a warning.
ALIASES = {
    "experimental_run_v2": "run",
    "experimental_distribute_dataset": "distribute_dataset",
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "experimental_local_results": "local_results",
    "experimental_make_numpy_dataset": "make_numpy_dataset",
    "experimental_distribute_values_from_function": "distribute_values_from_function",
}

_LEARNING_RATE = (
    "Give optax a schedule, optax.sgd(lambda step: ...), or write optax.inject_hyperparams(optax.sgd)(0.1), whose learning rate "
    "is the variable optimizer.state.hyperparams['learning_rate']: assign to it."
)
_IN_A_LOADER = "Write DataLoader(data, batch_size=global_batch_size, shuffle=True) and strategy.distribute_dataset(loader)."
_NO_GRAPH = "Variables have their value from the start, and there are no graphs and sessions."
_ON_ITS_DEVICE = "Leave it out: each replica's rows go to its device."
_GRADIENTS = "Write loss, gradients = mr.value_and_grad(loss_fn, variables)()."
#: Names that both kinds of our datasets lack.
_OF_DATASETS = {
    "cardinality": "Write len(dataset), a TypeError where it is not known.",
    "shard": "Leave it out: strategy.distribute_dataset(dataset) gives each worker and each replica its own rows.",
    "prefetch": "Leave it out: batches are prepared ahead by mr.InputOptions(prefetch=2), the default.",
    "enumerate": "Write for i, batch in enumerate(dataset).",
    "set_epoch": "Each pass over the data has an order of its own by itself: leave it out.",
    **dict.fromkeys(("with_options", "options"), "Write strategy.distribute_dataset(dataset, mr.InputOptions(...))."),
}

#: Owner -> missing name -> the sentence that says what to write.
INSTEAD = {
    "mirrored": {
        "RunOptions": "strategy.run takes no options: write strategy.run(step, args=(x,)).",
        "distribute": "mirrored takes the place of tf.distribute: write mr.MirroredStrategy().",
        "experimental": "What it holds is in mirrored itself: write mr.MultiWorkerMirroredStrategy().",
        "cluster_resolver": "The resolvers are in mirrored itself: write mr.TFConfigClusterResolver().",
        "StrategyExtended": "Write strategy.run, strategy.reduce and strategy.devices.",
        "CrossDeviceOps": (
            "Write mr.MirroredStrategy(cross_device_ops=mr.HierarchicalCopyAllReduce()), mr.NcclAllReduce or "
            "mr.ReductionToOneDevice; or leave it out, and XLA chooses the collective for the devices."
        ),
        "TPUStrategy": "mr.MirroredStrategy() takes all accelerators of this machine.",
        "ParameterServerStrategy": "There are no parameter servers: write mr.MultiWorkerMirroredStrategy().",
        "CentralStorageStrategy": "Every device has its copy of the variables: write mr.MirroredStrategy().",
        "Server": "Workers are started by the command `mirrored launch -n 2 train.py`.",
        "DistributedValues": "Write mr.PerReplica.",
        "Mirrored": "A value that is the same on all replicas is an ordinary jax.Array.",
        "DistributedDataset": "Write mr.data.DistributedDataset.",
        "DistributedIterator": "Write mr.data.DistributedIterator.",
        "experimental_set_strategy": "Write `with strategy.scope():`.",
        "CheckpointManager": "Write mr.Checkpoint(directory, max_to_keep=3, model=variables).",
        "PreemptionCheckpointHandler": "Write mr.PreemptionHandler(checkpoint).",
        "GradientTape": _GRADIENTS,
        "nn": "Write mr.losses.compute_average_loss(per_example_loss).",
        "testing": "Import it by itself: from mirrored import testing.",
        "init_process_group": "Making the strategy connects the workers: write mr.MultiWorkerMirroredStrategy().",
        "DistributedDataParallel": "Make the variables in `with strategy.scope():`; mr.Optimizer sums their gradients.",
        "DistributedSampler": _IN_A_LOADER,
        "get_rank": "Write strategy.is_chief for rank == 0, and ctx.replica_id_in_sync_group in a step.",
        "get_world_size": "Write strategy.num_replicas_in_sync.",
    },
    "mr.Strategy": {
        "extended": (
            "It holds the parts that TensorFlow's strategies are made of. Write strategy.devices for extended.worker_devices, "
            "strategy.is_chief for extended.should_checkpoint, strategy.reduce for extended.reduce_to, and strategy.run for "
            "extended.update and extended.call_for_each_replica."
        ),
        "cluster_resolver": "Write strategy.cluster: cluster.spec.as_dict(), cluster.task_type and cluster.task_id.",
        "make_dataset_iterator": "Write iter(strategy.distribute_dataset(dataset)).",
        "make_input_fn_iterator": "Write iter(strategy.distribute_datasets_from_function(dataset_fn)).",
        "configure": "Give the devices when the strategy is made: mr.MirroredStrategy(devices).",
        "update_config_proto": _NO_GRAPH,
        "broadcast": "An array that is passed in strategy.run(step, args=(array,)) goes to every replica.",
        "unwrap": "Write strategy.local_results(value).",
        "experimental_": "Names have no `experimental_` here.",
        "rank": "Write strategy.is_chief for rank == 0, and ctx.replica_id_in_sync_group in a step.",
        "world_size": "Write strategy.num_replicas_in_sync, or strategy.num_workers for the number of processes.",
        "is_main_process": "Write strategy.is_chief.",
        "wait_for_everyone": "Write strategy.barrier('name').",
        "prepare": "Make the model and the optimizer in `with strategy.scope():`, and write strategy.distribute_dataset(loader).",
    },
    "mr.InputOptions": {
        "experimental_fetch_to_device": _ON_ITS_DEVICE,
        "experimental_place_dataset_on_device": _ON_ITS_DEVICE,
        "experimental_per_replica_buffer_size": "Write mr.InputOptions(prefetch=2), the number of batches ahead.",
        "experimental_replication_mode": (
            "Leave it out: strategy.distribute_dataset takes global batches, strategy.distribute_datasets_from_function those of "
            "one replica."
        ),
    },
    "mr.data.DistributedDataset": {
        **_OF_DATASETS,
        **{
            name: f"Call it before: strategy.distribute_dataset(dataset.{name}(...))."
            for name in ("batch", "unbatch", "shuffle", "filter", "skip", "cache")
        },
        "reduce": "Write for batch in dataset: state = strategy.run(step, args=(batch,)).",
        "as_numpy_iterator": "Write strategy.gather(batch, axis=0) for all rows of a batch.",
        "sampler": _IN_A_LOADER,
    },
    "mr.data.DistributedIterator": {
        **dict.fromkeys(("get_next", "next"), "Write next(iterator)."),
        "get_next_as_optional": "Write next(iterator, None), which is None at the end; or for batch in dataset.",
        **dict.fromkeys(("initialize", "initializer"), "It is ready when it is made: iterator = iter(dataset)."),
        "save": "Write state = iterator.get_state(), or mr.Checkpoint(directory, iterator=iterator).",
        "restore": "Write iterator.set_state(state), or mr.Checkpoint(directory, iterator=iterator).",
    },
    "mr.data.NumpyDataset": {
        **_OF_DATASETS,
        "cache": "Leave it out: the rows are in memory.",
        "filter": "Choose the rows first: strategy.make_numpy_dataset((x[keep], y[keep])), with keep = a boolean array.",
        "skip": "Choose the rows first: strategy.make_numpy_dataset((x[count:], y[count:])).",
        "unbatch": "Leave batch out; rows are batched once.",
        "padded_batch": "Rows have one shape: write dataset.batch(global_batch_size).",
        "as_numpy_iterator": "Write for batch in dataset.",
    },
    "mr.Variable": {
        "grad": "Write gradient = mr.grad(loss_fn, variable)().",
        "data": "Write variable.value.",
        "detach": "Write jax.lax.stop_gradient(variable.value).",
        "sparse_read": "Write variable[indices].",
        "gather_nd": "Write variable[tuple(jnp.moveaxis(indices, -1, 0))].",
        "batch_scatter_update": "Write variable.assign(variable.value.at[batch, indices].set(updates)).",
        "scatter_nd_add": "Write variable.assign(variable.value.at[rows, columns].add(updates)).",
        "scatter_nd_sub": "Write variable.assign(variable.value.at[rows, columns].add(-updates)).",
        "scatter_nd_update": "Write variable.assign(variable.value.at[rows, columns].set(updates)).",
        "values": "Write strategy.local_results(variable).",
        "handle": "Write variable.value for the array.",
        "get_shape": "Write variable.shape.",
        "set_shape": "A variable keeps its shape.",
        "distribute_strategy": "Keep the strategy in whose scope it was made.",
        "eval": "Write variable.numpy().",
        "load": "Write variable.assign(value).",
        **dict.fromkeys(("ref", "experimental_ref"), "A variable can be a key of a dict itself."),
        "constraint": "Assign what satisfies it: variable.assign(jnp.clip(variable, 0, 1)).",
        **dict.fromkeys(("initializer", "initialized_value", "initial_value", "is_initialized", "op", "graph"), _NO_GRAPH),
    },
    "mr.Optimizer": {
        **dict.fromkeys(("learning_rate", "lr", "param_groups"), _LEARNING_RATE),
        **dict.fromkeys(("compute_gradients", "get_gradients"), _GRADIENTS),
        "step": "Write optimizer.apply_gradients(gradients).",
        "zero_grad": "Leave it out: gradients are values, and none are kept between steps.",
        "build": "Its state is made with it: mr.Optimizer(tx, variables).",
        "weights": "Write optimizer.state.",
        "get_weights": "Write jax.tree.map(np.asarray, optimizer.state).",
        "set_weights": "Write mr.Checkpoint(directory, optimizer=optimizer).restore_latest().",
    },
    "mr.ReplicaContext": {
        "devices": "Write ctx.strategy.devices: one program runs on all of them.",
        "replica_id": "Write ctx.replica_id_in_sync_group.",
        "reduce": "Write ctx.all_reduce('sum', value).",
        "broadcast": "Write mr.Variable(..., aggregation='only_first_replica'), whose assign takes the value of replica 0.",
    },
}


def explain_arguments(kind: ClassT) -> ClassT:
    """Let a class say what to write in place of an argument that it does not take."""
    owner, init = f"mr.{kind.__name__}", kind.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        for name in given.keys() & INSTEAD[owner].keys():
            raise TypeError(f"{owner} has no argument {name!r}. {INSTEAD[owner][name]}")
        init(self, *args, **given)

    kind.__init__ = checked
    return kind


def hints(owner: str) -> Callable[[ClassT], ClassT]:
    """Let a class say what to write in place of a missing attribute; type checkers still report the name."""

    def hint(self: object, name: str) -> NoReturn:
        raise missing(owner, name)

    def add(kind: ClassT) -> ClassT:
        kind.__getattr__ = hint  # pyrefly: ignore[missing-attribute]
        if owner == "mr.Strategy":
            for old in ALIASES:
                setattr(kind, old, functools.partialmethod(_call_renamed, old))
        return kind

    return add


def _call_renamed(strategy: Any, old: str, *args: Any, **kwargs: Any) -> Any:
    warnings.warn(f"strategy.{old} is called strategy.{ALIASES[old]} here.", DeprecationWarning, stacklevel=2)
    return getattr(strategy, ALIASES[old])(*args, **kwargs)


def missing(owner: str, name: str) -> AttributeError:
    """Return the error for a missing attribute of an owner such as `mr.Strategy`, with the line to write, if any."""
    sentence = INSTEAD[owner].get(name)
    if not sentence and name.startswith("experimental_"):
        sentence = INSTEAD[owner].get("experimental_")
    return AttributeError(f"{owner} has no attribute {name!r}" + f". {sentence}" * bool(sentence))
