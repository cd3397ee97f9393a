"""A worker that distributes, reduces and gathers trees, and large values, and says "right" if all came back as they were."""

import numpy as np

import mirrored as mr

strategy = mr.MultiWorkerMirroredStrategy()
count = strategy.num_replicas_in_sync
large = np.arange(count * 300_000, dtype=np.float32).reshape(count * 3, -1)


def values(context: mr.ValueContext) -> dict[str, object]:
    """Return small values, large ones, and rows that other replicas have not."""
    i = context.replica_id_in_sync_group
    small = [np.float32([k, i]) for k in range(30)]
    return {"small": small, "ints": np.arange(3) + i, "large": large[3 * i :][:3], "uneven": np.full((i, 2), 0.5, np.float32)}


tree = strategy.distribute_values_from_function(values)
even = {name: value for name, value in tree.items() if name != "uneven"} | {"number": 3.0, "array": np.float32([1, 2])}
ids = sum(range(count))
for _ in range(2):
    total, mean = strategy.reduce("sum", even), strategy.reduce("mean", tree, axis=0)
    gathered = strategy.gather(tree, axis=0)
    assert [np.asarray(leaf).tolist() for leaf in total["small"]] == [[k * count, ids] for k in range(30)]
    assert (float(total["number"]), np.asarray(total["array"]).tolist()) == (3.0 * count, [count, 2 * count])
    assert np.asarray(mean["ints"]).item() == 1 + ids / count and np.asarray(mean["uneven"]).tolist() == [0.5, 0.5]
    np.testing.assert_array_equal(gathered["large"], large)
    assert gathered["uneven"].shape == (ids, 2)
    np.testing.assert_array_equal(gathered["ints"], np.concatenate([np.arange(3) + i for i in range(count)]))
for dataset in ([large, large], strategy.make_numpy_dataset(large).batch(count * 3 - 1)):
    rows = [np.asarray(strategy.gather(batch, axis=0)) for batch in strategy.distribute_dataset(dataset)]
    np.testing.assert_array_equal(np.concatenate(rows)[: len(large)], large)
print("right", flush=True)
