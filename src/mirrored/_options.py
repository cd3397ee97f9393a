"""The options that users pass: frozen, and validated at creation."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, TypeAlias

from . import _tf_names

#: The names that users may pass for the members of the enums below; any other case works too.
ReduceOpName: TypeAlias = Literal["sum", "mean", "max", "min", "SUM", "MEAN", "MAX", "MIN"]
SynchronizationName: TypeAlias = Literal["auto", "on_write", "on_read", "AUTO", "ON_WRITE", "ON_READ"]
AggregationName: TypeAlias = Literal[
    "none", "sum", "mean", "max", "min", "only_first_replica", "NONE", "SUM", "MEAN", "MAX", "MIN", "ONLY_FIRST_REPLICA"
]
CommunicationName: TypeAlias = Literal["auto", "ring", "nccl", "mpi", "AUTO", "RING", "NCCL", "MPI"]
StorageName: TypeAlias = Literal["whole", "parts", "parts_of_worker", "WHOLE", "PARTS", "PARTS_OF_WORKER"]
ShardPolicyName: TypeAlias = Literal["auto", "file", "data", "off", "AUTO", "FILE", "DATA", "OFF"]


def check_int(name: str, value: object, at_least: int, unit: str) -> None:
    """Refuse a value that is no int of at least `at_least`: `check_int("prefetch", -1, 0, "batches")`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int, the number of {unit}.")
    if value < at_least:
        raise ValueError(f"{name} is {value}; expected {at_least} or more {unit}.")


class NamedChoice(enum.Enum):
    """An enum whose members can be given by name, in any case; its errors list the names."""

    @classmethod
    def parse(cls, given: object, argument: str, among: Iterable[Self] = ()) -> Self:
        choices = tuple(among) or tuple(cls)
        if given in choices:
            return given  # type: ignore[return-value]
        for member in choices:
            if isinstance(given, str) and given.upper() == member.name:
                return member
        names = ", ".join(repr(member.name.lower()) for member in choices)
        error = ValueError if isinstance(given, str | cls) else TypeError
        raise error(
            f"{argument} is {given!r}; expected one of {names} or a member of mr.{cls.__name__}, "
            f"for example mr.{cls.__name__}.{next(iter(cls)).name}."
        )


class AutoShardPolicy(NamedChoice):
    """The policy by which several workers divide the records of one dataset. With one worker, all are the same.

    * `AUTO`: `FILE` if the dataset reads at least one file for each worker, and neither the pipeline nor `drop_remainder`
      depends on records of several files; else `DATA`. The log has one line with the choice and its reason.
    * `FILE`: worker i reads the files i, i + W, ..., so one worker reads each record. A step still takes one
      global batch: every worker contributes its replicas' share, or nothing when it has no more records.
      Each worker completes the batches of `.batch(n, drop_remainder=True)`, and drops its own remainder.
    * `DATA`: every worker runs the whole pipeline and takes its replicas' rows of each global batch. The
      pipeline must yield the same batches on all workers: seed every shuffle.
    * `OFF`: records are not divided. Each worker's pipeline yields that worker's own batches for its own
      replicas; if the pipeline is the same on W workers, every record comes W times.

    >>> mr.AutoShardPolicy.FILE
    <AutoShardPolicy.FILE: 'FILE'>

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


@_tf_names.explain_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The options of a distributed dataset.

    Args:
        drop_remainder: drop rows so that all replicas get the same number: the last `n mod R` rows of a global
            batch of n rows, and the remaining rows of other workers when one has no more records.
            Default False: every row is used, and the replicas really see different numbers of rows.
        prefetch: how many batches a thread prepares and moves to the devices ahead of the batch in use; each takes device
            memory. With 0, the thread that takes a batch prepares it. Default 2: one to hide the preparation, and one for
            batches that take longer.
        auto_shard_policy: how several workers divide the records: `mr.AutoShardPolicy` or its name.

    Raises:
        TypeError, ValueError: for a value of the wrong type, or a negative `prefetch`.

    >>> mr.InputOptions(drop_remainder=True, auto_shard_policy="data")
    InputOptions(drop_remainder=True, prefetch=2, auto_shard_policy=<AutoShardPolicy.DATA: 'DATA'>)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    drop_remainder: bool = False
    prefetch: int = 2
    auto_shard_policy: AutoShardPolicy | ShardPolicyName = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder is {self.drop_remainder!r}; expected True or False.")
        check_int("prefetch", self.prefetch, 0, "batches ahead")
        object.__setattr__(self, "auto_shard_policy", AutoShardPolicy.parse(self.auto_shard_policy, "auto_shard_policy"))


class CommunicationImplementation(NamedChoice):
    """The implementation that carries values between the workers. `mr.CollectiveCommunication` is the enum's old name.

    * `AUTO`: NCCL between GPUs, gloo between CPUs.
    * `RING`: NCCL's ring algorithm between GPUs (`NCCL_ALGO=Ring`); gloo, which is a ring, between CPUs.
    * `NCCL`: NCCL; an error without GPUs.
    * `MPI`: experimental, between CPUs with one replica each: needs `MPITRAMPOLINE_LIB`, and workers started by mpirun.

    >>> mr.CommunicationImplementation.RING
    <CommunicationImplementation.RING: 'RING'>

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    MPI = "MPI"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """The options of the communication between workers.

    Args:
        implementation: `mr.CommunicationImplementation` or its name.
        bytes_per_pack: in an all-reduce of a tree, such as the gradients, arrays travel together until they reach
            this many bytes. 0: the library chooses (up to 8 arrays below 128 KiB travel together; larger ones alone).
        timeout_seconds: how long the other workers may take to start, and how long a step may last, before
            this worker ends with an error that names the late worker. None: 300 s to start; for a step, the larger
            of 300 s and 20 times the duration of earlier steps.

    Raises:
        TypeError, ValueError: for a value of the wrong type, a negative one, or a timeout of less than a second.

    >>> mr.CommunicationOptions(implementation="ring", timeout_seconds=120)
    CommunicationOptions(implementation=<CommunicationImplementation.RING: 'RING'>, bytes_per_pack=0, timeout_seconds=120)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions
    """

    implementation: CommunicationImplementation | CommunicationName = CommunicationImplementation.AUTO
    bytes_per_pack: int = 0
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        parsed = CommunicationImplementation.parse(self.implementation, "implementation")
        object.__setattr__(self, "implementation", parsed)
        check_int("bytes_per_pack", self.bytes_per_pack, 0, "bytes (0: chosen here)")
        seconds = self.timeout_seconds
        if seconds is None:
            return
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"timeout_seconds is {seconds!r}; expected seconds, or None.")
        if not 1 <= seconds <= MAX_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout_seconds is {seconds}; expected 1 to {MAX_TIMEOUT_SECONDS:.0f} seconds, or None; it must be longer "
                "than any step."
            )


MAX_TIMEOUT_SECONDS = 7 * 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """The common part of TensorFlow's two all-reduces."""

    num_packs: int = 1  # see `NcclAllReduce`

    def __post_init__(self) -> None:
        check_int("num_packs", self.num_packs, 0, "packs (0: each array alone)")

    def __repr__(self) -> str:
        return f"mr.{type(self).__name__}(num_packs={self.num_packs})"


@dataclasses.dataclass(frozen=True, repr=False)
class NcclAllReduce(AllReduce):
    """TensorFlow's option for sums by NCCL, which XLA uses between GPUs anyway. With CPU devices it is an error.

    Args:
        num_packs: TensorFlow's number of packs of gradients. It changes nothing: small arrays travel together, up to
            the bytes in `mr.CommunicationOptions(bytes_per_pack=...)`.

    Raises:
        TypeError: when `num_packs` is no int.
        ValueError: when it is negative; the strategy raises one when its devices are CPUs.

    >>> mr.NcclAllReduce(num_packs=2)
    mr.NcclAllReduce(num_packs=2)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/NcclAllReduce
    """


@dataclasses.dataclass(frozen=True, repr=False)
class HierarchicalCopyAllReduce(AllReduce):
    """TensorFlow's option for sums in a hierarchy. It changes nothing: XLA, and NCCL between GPUs, choose the links.

    Args:
        num_packs: see `mr.NcclAllReduce`.

    Raises:
        TypeError: when `num_packs` is no int.
        ValueError: when it is negative.

    >>> mr.HierarchicalCopyAllReduce()
    mr.HierarchicalCopyAllReduce(num_packs=1)

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/HierarchicalCopyAllReduce
    """


@dataclasses.dataclass(frozen=True, repr=False)
class ReductionToOneDevice:
    """An option that gathers the replicas' arrays, and calls a function on them in place of their sum.

    One program runs on all devices, so each device gathers all arrays and computes the same result; none waits for another.
    This needs R times the memory of each array. Without a function the option changes nothing.

    Args:
        reduce_to_device: TensorFlow's argument. It changes nothing, because every device has the result.
        accumulation_fn: takes a list of R arrays of one shape and dtype, in replica order, and returns one array like
            them. None: their sum. It replaces the sum in `all_reduce`, `strategy.reduce` and the gradients of
            `mr.Optimizer`; a MEAN is its result divided by R. A variable's `aggregation` still adds up.

    Raises:
        TypeError: when `accumulation_fn` is no function; a step raises one when it returns anything else.

    >>> largest = mr.ReductionToOneDevice(accumulation_fn=lambda values: jnp.stack(values).max(axis=0))
    >>> strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=largest)
    >>> x = strategy.distribute_values_from_function(lambda ctx: 10 + ctx.replica_id_in_sync_group)
    >>> int(strategy.reduce("sum", x))
    11

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/ReductionToOneDevice
    """

    reduce_to_device: Any = None
    accumulation_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.accumulation_fn is not None and not callable(self.accumulation_fn):
            raise TypeError(f"accumulation_fn is {self.accumulation_fn!r}; expected a function of a list of arrays, or None.")

    def __repr__(self) -> str:
        """Show the function's name, which is the same on all workers."""
        function = self.accumulation_fn
        if function is not None:
            function = getattr(function, "__qualname__", type(function).__name__)
        return f"mr.ReductionToOneDevice(reduce_to_device={self.reduce_to_device!r}, accumulation_fn={function})"


CrossDeviceOps = NcclAllReduce | HierarchicalCopyAllReduce | ReductionToOneDevice


class ReduceOp(NamedChoice):
    """The operation that combines values: `SUM`, `MEAN`, `MAX` or `MIN`. You may pass the names everywhere, in any case.

    `MAX` and `MIN`, which TensorFlow lacks, take real numbers and bools, and keep their dtype. As with `jnp.max`, NaN wins,
    and values that tie share the gradient.

    >>> mr.ReduceOp.SUM
    <ReduceOp.SUM: 'SUM'>

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/ReduceOp
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"


class VariableSynchronization(NamedChoice):
    """The time at which the copies of a variable are combined.

    * `AUTO`: the same as `ON_WRITE`.
    * `ON_WRITE`: mirrored. Every write leaves the same value on all replicas.
    * `ON_READ`: each replica has its own value; reading it outside a replica aggregates them.
    * `NONE`: refused; it exists in TensorFlow's enum, but TensorFlow refuses it too.

    >>> mr.VariableSynchronization.ON_READ.name
    'ON_READ'

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(NamedChoice):
    """The rule that combines the replicas' values of a variable into one.

    * `NONE`: no rule. A mirrored variable then takes only values that are provably the same on every
      replica; a sync-on-read variable cannot be read outside a replica.
    * `SUM`, `MEAN`, `MAX`, `MIN`: over all replicas. TensorFlow has no `MAX` and `MIN`.
    * `ONLY_FIRST_REPLICA`: the value of replica 0.

    >>> mr.VariableAggregation.MEAN.name
    'MEAN'

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/VariableAggregation
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    MAX = "MAX"
    MIN = "MIN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class Storage(NamedChoice):
    """The way in which devices store mirrored values. Results are the same in all ways.

    * `WHOLE`: every device has all of it.
    * `PARTS`: each of n devices has the n-th part of every large array, and gathers the rest where a step needs it. Other
      libraries call this fully sharded, FSDP or ZeRO-3. Arrays below 128 KiB, complex numbers and random keys stay whole.
    * `PARTS_OF_WORKER`: the devices of each worker divide the arrays, so that every worker has all of them. Gathers stay within
      a worker, and one sum of parts goes between workers. Others call this hybrid sharding, HSDP. With one worker it is `PARTS`.

    >>> mr.Storage.PARTS
    <Storage.PARTS: 'PARTS'>
    """

    WHOLE = "WHOLE"
    PARTS = "PARTS"
    PARTS_OF_WORKER = "PARTS_OF_WORKER"
