"""In which trace the program is, which caches JAX uses, and how functions are traced and run."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import hijax
from programs import VECTOR

from mirrored._jax import interpreter, jaxprs, tracing, user_code
from mirrored._replicas.collectives import ReplicaAxis
from mirrored._typing import REPLICA_AXIS as AXIS


def test_inner_caches_are_shared_without_and_apart_with_a_token():
    traced = []

    @jax.jit
    def inner(x):
        traced.append(1)
        return x * 2

    def outer(x):
        return inner(x)

    def num_traced():
        jax.make_jaxpr(outer)(VECTOR), jax.make_jaxpr(outer)(VECTOR)
        return len(traced)

    assert num_traced() == 1, "JAX has stopped to cache inner traces: separate_caches is no longer needed"
    with tracing.separate_caches() as renew:
        assert num_traced() == 2
        renew()
        assert num_traced() == 3
    assert num_traced() == 3, "leaving the block restores the caches"


def test_trace_speaks_of_the_users_function():
    def users_step(x): ...

    with pytest.raises(jax.errors.TracerBoolConversionError, match="function users_step at"):
        tracing.trace(lambda x: 1 if x[0] else 2, (VECTOR,), None, users_step)


class Doubled(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
    """A high-level primitive of a user, of which the jaxpr shows no more than the name."""

    def __init__(self, aval, reduce):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"reduce": reduce}
        super().__init__()

    def expand(self, x):
        return jax.lax.psum(x, AXIS) * 2 if self.reduce else x * 2


def high(reduce):
    def function(x):
        aval = jax.typeof(x)
        y = Doubled(aval, reduce)(x)
        return jax.lax.scan(lambda c, _: (c + Doubled(aval, reduce)(x), None), y, None, length=2)[0] + 1

    return function


@pytest.mark.parametrize("reduce", [True, False])
def test_high_level_primitives_are_traced_as_what_they_stand_for(reduce):
    """A collective inside one would not be seen. JAX lowers them when it compiles; we do it to look at them."""
    function = high(reduce)
    traced = tracing.trace(lambda x: [function(x)], (VECTOR,), ReplicaAxis(3), function)
    closed = tracing.lowered(traced, ReplicaAxis(3))
    found = list(jaxprs.all_equations(closed.jaxpr))
    assert not [e for e in found if "hi_prim" in e.primitive.name]
    assert sum(map(jaxprs.is_collective, found)) == 2 * reduce
    first = function.__code__.co_firstlineno
    assert {user_code.equation_line(e) for e in closed.jaxpr.eqns} == {f"{__file__}:{first + n}" for n in (2, 3)}
    mesh = jax.sharding.Mesh(jax.devices()[:3], (AXIS,))

    def body(x):
        return [interpreter.evaluate(one, one.consts, [x])[0] for one in (closed, traced)]

    replicated = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
    for result in jax.jit(mapped)(VECTOR):
        assert result.tolist() == [1 + (3 if reduce else 1) * 2 * 3] * 3


SETTINGS: dict[str, Callable[[], Any]] = {
    "x64": lambda: jax.enable_x64(True),
    "partitionable": lambda: jax.threefry_partitionable(False),
    "key kind": lambda: jax.default_prng_impl("rbg"),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "device": lambda: jax.default_device(jax.devices()[1]),
    "user context": lambda: USER_CONTEXT(1),
}
USER_CONTEXT = jax.make_user_context(None)


def test_settings_are_all_that_jit_has_in_its_keys_and_separate_caches_are_none() -> None:
    before = tracing.settings()
    assert before == tracing.settings() == (tracing.context(), tracing.key_kind()) and hash(before) == hash(tracing.settings())
    for name, setting in SETTINGS.items():
        traces: list[None] = []
        jitted = jax.jit(lambda x, traces=traces: [traces.append(None), x][1])
        jitted(1.0)
        with setting():
            assert tracing.settings() != before, name
            jitted(1.0)
        assert len(traces) == (1 if name == "key kind" else 2), name  # the one that JAX has forgotten
        assert tracing.settings() == before, name
    with tracing.separate_caches() as renew:
        assert tracing.settings() == before
        renew()
        assert tracing.settings() == before != (tracing.context(), tracing.key_kind())
    seen = []
    jax.make_jaxpr(lambda x: [seen.append(tracing.settings()), x][1])(1.0)
    assert seen == [before]
    assert tracing.is_wide() is False
    with jax.enable_x64(True):
        assert tracing.is_wide() is True
