"""Rows that the replicas do not divide evenly, and one device as the oracle of a step."""

import jax
import jax.numpy as jnp
import numpy as np
from strategies import arrays_of, ctx, strategy_of

import mirrored as mr

DEVICES = [f"cpu:{i}" for i in range(8)]
STRATEGIES = {r: strategy_of(r) for r in (1, 2, 3, 4)}
COLUMNS = 4


def total(value):
    return ctx().all_reduce("sum", value)


def data(num_rows, num_columns=COLUMNS):
    return np.random.default_rng(num_rows).normal(size=(num_rows, num_columns)).astype(np.float32)


def with_nan_padding(rows):
    """Make a PerReplica of arrays of different shapes, with NaN wherever no replica has a value."""
    shapes = tuple(own.shape for own in rows)
    padded = np.full((len(rows), *map(max, zip(*shapes, strict=True))), np.nan, np.float32)
    for i, own in enumerate(rows):
        padded[(i, *map(slice, own.shape))] = own
    return mr.PerReplica(jnp.asarray(padded), shapes if len(set(shapes)) > 1 else None)


def split(strategy, rows):
    """Divide rows by the split rule: the first replicas get one more."""
    return with_nan_padding(np.array_split(np.asarray(rows, np.float32), strategy.num_replicas_in_sync))


def run(strategy, step, *arrays):
    """Run a step on rows; join rows in its result, add up scalars, and leave mirrored values as they are."""

    def join(value):
        if not isinstance(value, mr.PerReplica):
            return value
        own = arrays_of(value)
        return np.concatenate(own) if value.ndim else sum(own)

    result = strategy.run(step, args=tuple(split(strategy, rows) for rows in arrays))
    strategy.assert_mirrored()
    return jax.tree.map(join, result, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))


def assert_equals_one_device(outcome, num_replicas=3, rtol=1e-4, atol=1e-5):
    """Compare what `outcome` returns for new strategies of one replica and of several; many programs of one step would warn."""
    outcomes = [outcome(mr.MirroredStrategy(DEVICES[:r])) for r in (1, num_replicas)]
    one, many = map(jax.tree_util.tree_leaves_with_path, outcomes)
    assert [path for path, _ in one] == [path for path, _ in many]
    for (path, value), (_, other) in zip(one, many, strict=True):
        np.testing.assert_allclose(other, value, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
