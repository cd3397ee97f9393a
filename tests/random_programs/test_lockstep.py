"""What computes random programs without XLA computes what XLA does, and finds copies that differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from random_programs import lockstep

import mirrored as mr

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
I = np.arange(-12, 12, dtype=np.int32).reshape(4, 6)  # noqa: E741


def differentiated(x: jax.Array) -> jax.Array:
    """Go to and fro through loops, conditions and calls."""

    @jax.checkpoint
    def layer(c: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(c + row), jax.lax.cond(row[0] > 0, jnp.sin, jnp.cos, c)

    def loss(x: jax.Array) -> jax.Array:
        c, ys = jax.lax.scan(layer, jnp.zeros(6), x, reverse=True)
        return jnp.sum(c * ys.mean(0)) + jax.nn.relu(x).max()

    return jax.grad(loss)(x)


#: Functions whose primitives are all that `lockstep` has a rule for.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "integers": lambda x, i: (jax.lax.div(i, jnp.int32(5)), jax.lax.rem(i, jnp.int32(5)), i & 3, i | 3, i ^ 3, ~i, i << 2,
        jax.lax.shift_right_logical(i, jnp.int32(3))),
    "powers": lambda x, i: (jax.lax.integer_pow(x, 3), jax.lax.integer_pow(x, -2), jnp.square(x), jax.grad(lambda x:
        jnp.tanh(x).sum())(x)),
    "joins": lambda x, i: (jnp.concatenate([x, 2 * x], 1), jnp.stack([x, x]), jnp.pad(x, ((1, 0), (0, 2))), jax.lax.pad(x,
        0.0, ((0, 0, 2), (-1, 1, 0))), list(x)),
    "places": lambda x, i: (jax.lax.dynamic_slice(x, (i[3, 5], 1), (2, 3)), jax.lax.dynamic_update_slice(x, x[:2, :2], (1,
        i[0, 0])), jnp.arange(5), jnp.sort(x, 0), jnp.argsort(x)),
    "reductions": lambda x, i: (x.sum(0), x.prod(1), x.max(1), x.min(), (x > 0).any(0), (x > 0).all(), jnp.argmax(x, 1),
        jnp.argmin(x, 0), jnp.cumsum(x, 1), jax.lax.cummax(x, 0, reverse=True), jnp.cumprod(x, 0)),
    "types": lambda x, i: (x.astype(jnp.int32), i.astype(jnp.float32), x.astype(jnp.bfloat16), jax.lax.bitcast_convert_type(x,
        jnp.int32), jax.lax.optimization_barrier((x, i)), jax.lax.stop_gradient(x)),
    "small types": lambda x, i: ((x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)), x.astype(jnp.bfloat16).sum(0),
        jnp.tanh(x.astype(jnp.bfloat16))),
    "random": lambda x, i: (jax.random.normal(jax.random.fold_in(jax.random.key(1), i[3, 3]), (3,)) + jax.vmap(lambda k:
        jax.random.bits(k))(jax.random.split(jax.random.key(2), 3)) ),
    "keys": lambda x, i: [jax.random.key_data(jax.lax.cond(x[0, 0] > 0, lambda k: k[1:3], lambda k: k[:2], jax.random.split(
        jax.random.key(i[0, 0]), (4,))).T), jax.random.bits(jax.random.wrap_key_data(jnp.stack([x[0, :2].astype(jnp.uint32)])
        )[0], (3, 2), jnp.uint8), jax.random.truncated_normal(jax.random.key(5), -1.0, 1.0, (4,))],
    "keys of another kind": lambda x, i: jax.random.normal(jax.random.fold_in(jax.random.key(i[0, 0], impl="rbg"), 3), (2,)),
    "searches": lambda x, i: (jax.lax.top_k(x, 2), jnp.searchsorted(jnp.sort(x[0]), x), jnp.searchsorted(jnp.sort(x[0]), x[1],
        side="right"), jax.scipy.special.erf(x), jax.lax.complex(x, -x).imag, jnp.stack([x, x], 1)),
    "solves": lambda x, i: (jax.scipy.sparse.linalg.cg(lambda y: y * (1 + x[0] ** 2), x[1], maxiter=3)[0], jax.grad(lambda y:
        jax.scipy.sparse.linalg.cg(lambda z: 2 * z, y, maxiter=2)[0].sum())(x[0])),
    "gathers": lambda x, i: (x[i % 4, 1], jnp.take_along_axis(x, i % 6, 1), x[1:, 2], jnp.take(x, i[:, 0], axis=0), x[i[2, 0]
        % 4, 1:3]),
    "gathers by row": lambda x, i: jax.vmap(lambda row, k: (row[k % 6], jax.lax.dynamic_slice(row, (k[0],), (3,))))(x, i),
    "gathers outside": lambda x, i: [jnp.take(x, i, axis=0, mode="clip"), jnp.take(x, i, axis=0), jnp.take(i, i, axis=1),
        jnp.take(x, i, axis=0, fill_value=7.0)],
    "scatters": lambda x, i: (x.at[i[2] % 4].add(1.0), x.at[i % 4, i % 6].add(x), x.at[1:3, ::2].set(5.0), x.at[i[:,
        0]].add(2.0), x.at[:, i[0] % 6].add(x)),
    "scatters by row": lambda x, i: jax.vmap(lambda row, k: (row.at[k % 6].add(row), jax.lax.dynamic_update_slice(row,
        row[:2], (k[1],))) )(x, i),
    "loops": lambda x, i: (differentiated(x), jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 2, jnp.abs(x)),
        jax.vmap(lambda y: jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * 2, y))(jnp.abs(x))),
    "convolutions": lambda x, i: [jax.value_and_grad(lambda x, k, n=groups: (jnp.sin(jax.lax.conv_general_dilated(
        x[None], k, (2,), "SAME", rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=n)).sum()), (0,
        1))(x, kernel) for kernel, groups in ((x[:2, :, None] + np.ones(3, np.float32), 1), (x[:3, None] * 2, 6))],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_computes_what_xla_does(name: str) -> None:
    ours, theirs = lockstep.jit(FUNCTIONS[name])(X, I), jax.jit(FUNCTIONS[name])(X, I)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), ours) == jax.tree.map(lambda a: (a.shape, a.dtype), theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        is_small = a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=1e-2 if is_small else 1e-5, atol=1e-6)


def mapped(function: Callable[..., Any], out: PartitionSpec, count: int = 3) -> Callable[..., Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("replica",))
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("replica"), out_specs=out, check_vma=False)


def own_way(x: jax.Array) -> jax.Array:
    """Go another way on each replica."""
    i = jax.lax.axis_index("replica")
    x = jax.lax.switch(i, [lambda x: x, lambda x: 2 * x, lambda x: x + 1], x)
    return jax.lax.while_loop(lambda c: c.max() < 10 * (i + 1), lambda c: c + 1, x)


COLLECTIVES: dict[str, Callable[[jax.Array], Any]] = {
    "sums": lambda x: jax.lax.psum((x, jnp.float32(1), x[0]), "replica")[0],
    "extremes": lambda x: jax.lax.pmax(x, "replica") - jax.lax.pmin(x, "replica"),
    "gathered": lambda x: jax.lax.all_gather(x, "replica").sum(0) + jax.lax.all_gather(x, "replica", axis=1, tiled=True).mean(),
    "scattered": lambda x: jax.lax.psum_scatter(x, "replica", scatter_dimension=1, tiled=True),
    "sent": lambda x: jax.lax.ppermute(x, "replica", [(0, 1), (1, 2)]),
    "exchanged": lambda x: (
        jax.lax.all_to_all(x, "replica", 1, 0, tiled=True).sum(0) + jax.lax.all_to_all(jnp.sin(x[:, :3]), "replica", 1, 0).mean()
    ),
    "numbered": lambda x: x + jax.lax.axis_index("replica"),
    "own way": own_way,
    "in a loop": lambda x: jax.lax.scan(lambda c, row: (c + jax.lax.psum(row, "replica"), row * c), x[0], x)[1],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_replicas_in_lockstep_compute_what_devices_do(name: str) -> None:
    x, step = np.arange(36, dtype=np.float32).reshape(6, 6), mapped(COLLECTIVES[name], PartitionSpec("replica"))
    ours, theirs = lockstep.jit(step)(x), jax.jit(step)(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert ours.sharding == theirs.sharding


def test_copies_that_differ_are_found() -> None:
    x = np.arange(3, dtype=np.float32)
    same = lockstep.jit(mapped(lambda x: jax.lax.psum(x, "replica"), PartitionSpec()))(x)
    np.testing.assert_array_equal(same, [3.0])
    with pytest.raises(lockstep.Diverged):
        lockstep.jit(mapped(lambda x: x, PartitionSpec()))(x)


def test_steps_are_computed_without_compiling_them() -> None:
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        w = mr.Variable(np.float32(1.0))
    [x] = strategy.distribute_dataset([np.arange(5, dtype=np.float32)])

    def step(x: jax.Array) -> jax.Array:
        w.assign_add(mr.get_replica_context().all_reduce("sum", x.sum()))
        return x * w

    with lockstep.patched():
        own = strategy.run(step, args=(x,))
    assert float(w) == 11.0
    np.testing.assert_array_equal(strategy.gather(own, axis=0), np.arange(5) * 11.0)
