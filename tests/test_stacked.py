"""reduce, gather and split of values with a replica axis, against numpy: any shapes, any sizes, any number of replicas."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mirrored as mr
from mirrored import _collectives, _stacked

DTYPES = ["float32", "int32", "uint8", "bool", "float16", "bfloat16", "complex64"]
few_examples = hypothesis.settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


@functools.cache
def strategy_of(num_replicas):
    return mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def make(strategy, values):
    return strategy.distribute_values_from_function(lambda ctx: values[ctx.replica_id_in_sync_group])


def numpy_reduce(op, values, axes):
    """Reduce in float64 (complex128) with the true number of elements."""
    wide = [np.asarray(v).astype(np.result_type(np.float64, np.asarray(v).dtype.char if v.dtype.kind == "c" else "f8")) for v in values]
    total = sum(v.sum(axis=axes) if axes else v for v in wide)
    if op == "sum":
        return total
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / np.float64(sum(math.prod(v.shape[a] for a in axes) for v in values))


def reduced_dtype(op, dtype):
    if dtype == bool:
        return np.int32 if op == "sum" else np.float32
    return np.float32 if op == "mean" and dtype.kind in "iu" else dtype


@st.composite
def per_replica_arrays(draw):
    """One small array for each replica, of one rank and dtype; sizes may differ along one axis, which is returned."""
    num_replicas = draw(st.sampled_from([1, 2, 3, 8]))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 3), min_size=num_replicas, max_size=num_replicas))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    low = 0 if dtype.kind == "u" else -3  # small integers: sums are exact in every dtype
    arrays = [random.integers(low, 4, [*shape[:axis], size, *shape[axis + 1 :]]).astype(dtype) for size in sizes]
    return num_replicas, axis, arrays


@few_examples
@hypothesis.given(per_replica_arrays(), st.sampled_from(["sum", "mean"]), st.data())
def test_reduce_is_that_of_numpy_with_the_true_number_of_rows(case, op, data):
    num_replicas, uneven_axis, arrays = case
    rank = arrays[0].ndim
    axes = data.draw(st.sets(st.integers(0, rank - 1))) | {uneven_axis}
    given = tuple(data.draw(st.permutations([data.draw(st.sampled_from([a, a - rank])) for a in axes])))
    strategy = strategy_of(num_replicas)
    result = strategy.reduce(op, make(strategy, arrays), axis=given[0] if len(given) == 1 else given)
    assert result.dtype == reduced_dtype(op, arrays[0].dtype) and result.is_fully_replicated
    expected = numpy_reduce(op, arrays, tuple(sorted(axes)))
    tolerance = 0 if op == "sum" else 2 * float(jnp.finfo(result.dtype).eps)
    np.testing.assert_allclose(np.asarray(result).astype(expected.dtype), expected, rtol=tolerance)


@few_examples
@hypothesis.given(per_replica_arrays())
def test_gather_is_concatenation_in_replica_order(case):
    num_replicas, axis, arrays = case
    strategy = strategy_of(num_replicas)
    for given in (axis, axis - arrays[0].ndim):
        result = strategy.gather(make(strategy, arrays), axis=given)
        assert result.dtype == arrays[0].dtype and result.is_fully_replicated
        np.testing.assert_array_equal(np.asarray(result), np.concatenate(arrays, axis=axis))


@few_examples
@hypothesis.given(per_replica_arrays(), st.sampled_from(["sum", "mean"]))
def test_reduce_of_equal_shapes_is_element_by_element(case, op):
    num_replicas, axis, arrays = case
    arrays = [np.take(a, [0] * 2, axis=axis) if a.shape[axis] else np.zeros_like(arrays[0], shape=_doubled(a, axis)) for a in arrays]
    strategy = strategy_of(num_replicas)
    result = strategy.reduce(op, make(strategy, arrays))
    assert result.dtype == reduced_dtype(op, arrays[0].dtype) and result.shape == arrays[0].shape
    expected = numpy_reduce(op, arrays, ()) / (num_replicas if op == "mean" else 1)
    tolerance = 0 if op == "sum" else 2 * float(jnp.finfo(result.dtype).eps)
    np.testing.assert_allclose(np.asarray(result).astype(expected.dtype), expected, rtol=tolerance)


def _doubled(array, axis):
    return (*array.shape[:axis], 2, *array.shape[axis + 1 :])
