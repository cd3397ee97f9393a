"""The context that tells a function for which worker it makes a dataset."""

from __future__ import annotations

import dataclasses

from ._sources.verbs import check_int


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The worker for which a function passed to `distribute_datasets_from_function` makes a dataset.

    Attributes:
        num_input_pipelines: the number of calls of the function: one on each worker.
        input_pipeline_id: this worker's number.
        num_replicas_in_sync: the number of replicas on all workers.

    >>> context = mr.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64), list(range(10))[context.input_pipeline_id :: context.num_input_pipelines]
    (16, [1, 3, 5, 7, 9])

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1
    _sizes: list[int] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return how many rows of a global batch each replica takes.

        Raises:
            TypeError: when `global_batch_size` is no int.
            ValueError: when it is less than 1, or the number of replicas does not divide it.
        """
        global_batch_size = check_int("global_batch_size is", global_batch_size, 1, "the rows of one step")
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"global_batch_size {global_batch_size} is not divisible by the {self.num_replicas_in_sync} replicas. Use a "
                "multiple, or strategy.distribute_dataset(dataset), which takes global batches and divides any number of rows."
            )
        self._sizes.append(size)
        return size

    def __str__(self) -> str:
        return f"mr.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
