"""A worker that combines values by a function of its own in place of sums."""

import jax.numpy as jnp
import numpy as np

import mirrored as mr


def main() -> None:
    largest = mr.ReductionToOneDevice(accumulation_fn=lambda rows: jnp.stack(rows).max(axis=0))
    strategy = mr.MultiWorkerMirroredStrategy(cross_device_ops=largest)
    number = strategy.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))
    found = strategy.run(lambda x: mr.get_replica_context().all_reduce("sum", x), args=(number,))
    assert int(found) == int(strategy.reduce("sum", number)) == strategy.num_replicas_in_sync - 1


if __name__ == "__main__":
    main()
