"""Options that users pass: frozen, validated when they are made."""

from __future__ import annotations

import dataclasses

from ._reduce_op import NamedChoice


class AutoShardPolicy(NamedChoice):
    """Say how several workers share the records of one dataset; with one worker all but OFF are the same.

    * `AUTO`: `FILE` when the dataset reads files and there is at least one for each worker, and nothing in the
      pipeline depends on records of several files; else `DATA`. One line of the log says which and why.
    * `FILE`: worker i reads the files i, i + W, ...; each record is read by one worker. A step still takes one
      global batch: every worker contributes its replicas' share, and a worker that has no record left none.
      Batches of `.batch(n, drop_remainder=True)` are completed on each worker, so each drops its own remainder.
    * `DATA`: every worker runs the whole pipeline and takes its replicas' rows of each global batch. The
      pipeline must yield the same batches on all workers: seed what shuffles.
    * `OFF`: nothing is shared out. Each worker's pipeline yields that worker's own batches, which are divided
      among its own replicas; a pipeline that is the same on W workers gives every record W times.

    >>> mr.AutoShardPolicy.FILE
    <AutoShardPolicy.FILE: 'FILE'>

    Source: https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Say how a dataset is distributed.

    Args:
        drop_remainder: leave out rows so that all replicas get the same number: the last `n mod R` rows of a
            global batch of n rows, and what other workers have left when one has no record any more.
            Default False: every row is used, and the replicas really see different numbers of rows.
        prefetch: how many batches are prepared in the background and moved to the devices ahead of the one in
            use; each costs one batch of device memory. 0 prepares each when it is asked for, in the thread
            that asks. Default 2: one to hide the preparation, one more for batches that take longer.
        auto_shard_policy: how several workers share the records: `mr.AutoShardPolicy` or its name.

    Raises:
        TypeError, ValueError: for a value of the wrong type, or a negative `prefetch`.

    >>> mr.InputOptions(drop_remainder=True, auto_shard_policy="data")
    InputOptions(drop_remainder=True, prefetch=2, auto_shard_policy=<AutoShardPolicy.DATA: 'DATA'>)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    drop_remainder: bool = False
    prefetch: int = 2
    auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder is {self.drop_remainder!r}; expected True or False.")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(f"prefetch is {self.prefetch!r}; expected an int, the number of batches ahead.")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; expected 0 or more batches.")
        object.__setattr__(self, "auto_shard_policy", AutoShardPolicy.parse(self.auto_shard_policy, "auto_shard_policy"))
