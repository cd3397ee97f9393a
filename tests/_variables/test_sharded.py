"""A sharded variable is one value to all who read and assign it, and each replica stores a part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored import testing
from mirrored._variables.sharded import ShardedVariable

VALUE = np.arange(7, dtype=np.float32).reshape(7, 1)


def sharded(strategy, value=VALUE):
    with strategy.scope():
        return ShardedVariable(value, name="s")


def test_it_is_read_and_assigned_as_a_whole(strategy3):
    variable = sharded(strategy3)
    assert variable.shape == (7, 1) and variable.ndim == 2 and variable.size == len(variable) == 7
    assert variable.synchronization is mr.VariableSynchronization.ON_WRITE and not variable.trainable
    np.testing.assert_array_equal(variable, VALUE)
    variable.assign_add(VALUE)
    np.testing.assert_array_equal(variable.numpy(), 2 * VALUE)
    [leaf] = jax.tree.leaves(variable)
    np.testing.assert_array_equal(leaf, 2 * VALUE)

    def step():
        variable.assign_sub(np.ones_like(VALUE))
        return variable.value * 2

    np.testing.assert_array_equal(strategy3.run(step), 2 * (2 * VALUE - 1))
    np.testing.assert_array_equal(mr.function(lambda: variable.assign(variable.value + 1).value)(), 2 * VALUE)
    assert repr(variable) == "mr.Variable(name='s', shape=(7, 1), dtype=float32, in 3 parts of 3 elements, one on each replica)"
    testing.assert_equal_copies([variable])
    strategy3.assert_mirrored()
    assert [shard.data.shape for shard in variable._array.addressable_shards] == [(1, 3)] * 3


def test_each_replica_has_the_whole_value_to_the_bit(strategy3):
    value = np.array([-0.0, 1e-45, np.nan, np.inf, 5], np.float32)
    variable = sharded(strategy3, value)
    for own in (*strategy3.local_results(variable), strategy3.reduce("mean", variable), variable.value):
        np.testing.assert_array_equal(np.asarray(own).view(np.int32), value.view(np.int32))


def test_what_may_differ_by_replica_is_refused(strategy2, per_replica):
    variable = sharded(strategy2)
    given = per_replica(strategy2, VALUE, VALUE)
    with pytest.raises(mr.ReplicasDivergeError, match="variable 's' is mirrored"):
        strategy2.run(lambda x: variable.assign(x), args=(given,))
    with pytest.raises(mr.ReplicasDivergeError, match="variable 's' was given a PerReplica"):
        variable.assign(given)
    with pytest.raises(ValueError, match="shape"):
        variable.assign(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match=r"each replica holds a part.*variable.value.at"):
        variable.scatter_update([0], [[1.0]])
    np.testing.assert_array_equal(variable, VALUE)


def test_its_gradient_is_not_asked_for(strategy2):
    variable = sharded(strategy2)
    with pytest.raises(mr.ContextError, match=r"variable 's' is an optimizer's state.*optimizer.variables"):
        strategy2.run(lambda: mr.grad(lambda: jnp.sum(variable.value), [variable])()[0])
