"""The step with mirrored, and the same step written by hand in JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Contender
from _workloads import HEADS, LEARNING_RATE, WIDTH, Workload
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

Params = dict[str, jax.Array]

#: Gradients of fewer elements than this travel in one buffer in the packed contender.
SMALL = 8192


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _linear(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return _cross_entropy(x @ params["w"] + params["b"], y)


def _mlp(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    for i in range(2):
        x = jax.nn.relu(x @ params[f"w{i}"] + params[f"b{i}"])
    return _cross_entropy(x @ params["w2"] + params["b2"], y)


def _conv(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    for i, stride in enumerate((1, 2, 2)):
        x = jax.lax.conv_general_dilated(x, params[f"w{i}"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + params[f"b{i}"])
    return _cross_entropy(x.mean((1, 2)) @ params["w"] + params["b"], y)


def _normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _transformer(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    h = params["embedding"][x] + params["position"]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for i in range(sum(name.startswith("query") for name in params)):
        a = _normalized(h, params[f"scale{i}a"])
        heads = [(a @ params[f"{name}{i}"]).reshape(*x.shape, HEADS, -1) for name in ("query", "key", "value")]
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / np.sqrt(WIDTH / HEADS)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        h = h + jnp.einsum("bhqk,bkhd->bqhd", weights, heads[2]).reshape(h.shape) @ params[f"out{i}"]
        h = h + jax.nn.gelu(_normalized(h, params[f"scale{i}b"]) @ params[f"up{i}"]) @ params[f"down{i}"]
    return _cross_entropy(h @ params["w"], y).mean(axis=-1)


#: The losses of the examples, `(params, x, y) -> [batch]`, by workload.
LOSSES: dict[str, Callable[..., jax.Array]] = {"W1": _linear, "W2": _mlp, "W3": _conv, "W4": _transformer}


def mirrored_step(
    strategy: mr.Strategy, workload: Workload, shard_state: bool = False
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Make a model of its own, and its training step, which returns the loss."""
    with strategy.scope():
        variables = {name: mr.Variable(array, name=name) for name, array in workload.parameters().items()}
        optimizer = mr.Optimizer(optax.adam(LEARNING_RATE), variables, shard_state=shard_state)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            params = {name: variable.value for name, variable in variables.items()}
            return LOSSES[workload.name](params, x, y)

        value, gradients = mr.value_and_grad(loss, variables)()
        optimizer.apply_gradients(gradients)
        return value

    return step


def with_mirrored(workload: Workload, num_replicas: int, shard_state: bool = False) -> Contender:
    name = "mirrored, shard_state" if shard_state else "mirrored"
    return with_strategy(name, mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]), workload, shard_state)


def with_strategy(name: str, strategy: mr.Strategy, workload: Workload, shard_state: bool = False) -> Contender:
    step = mirrored_step(strategy, workload, shard_state)
    batches = itertools.cycle(list(strategy.distribute_dataset(workload.batches())))

    def run(num_steps: int) -> float:
        for batch in itertools.islice(batches, num_steps):
            losses = strategy.run(step, args=batch)
        strategy.barrier("end of a turn")
        return sum(map(float, losses.values))

    return Contender(name, run)


def by_hand(workload: Workload, num_replicas: int) -> Contender:
    """`jit(shard_map)` with one psum of the gradient tree."""
    return _by_hand("by hand", workload, num_replicas)


def by_hand_packed(workload: Workload, num_replicas: int) -> Contender:
    """The same with the small gradients packed into one buffer."""
    return _by_hand("by hand, packed", workload, num_replicas, packed_psum)


def on_one_device(workload: Workload) -> Contender:
    """The whole batch on one device, with nothing to communicate."""
    return _by_hand("one device", workload, 1, lambda gradients: gradients)


def packed_psum(gradients: Params) -> Params:
    small = {name: g for name, g in gradients.items() if g.size < SMALL}
    large = {name: g for name, g in gradients.items() if g.size >= SMALL}
    packed, unpack = ravel_pytree(small)
    packed, large = jax.lax.psum((packed, large), "data")
    return unpack(packed) | large


def by_hand_step(workload: Workload, mesh: Mesh, combine: Callable[[Params], Params] | None = None) -> tuple[Any, list[Any]]:
    """Make `(params, state, x, y) -> (params, state, losses)`, and the first two of these."""
    mirrored, split = PartitionSpec(), PartitionSpec("data")
    tx = optax.adam(LEARNING_RATE)

    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any, jax.Array]:
        def loss(params: Params) -> jax.Array:
            return jnp.sum(LOSSES[workload.name](params, x, y)) / workload.batch

        value, gradients = jax.value_and_grad(loss)(params)
        combined = jax.lax.psum(gradients, "data") if combine is None else combine(gradients)
        updates, state = tx.update(combined, state, params)
        return optax.apply_updates(params, updates), state, value[None]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(mirrored, mirrored, split, split), out_specs=(mirrored, mirrored, split), check_vma=False
    )
    params = workload.parameters()
    state = jax.tree.map(np.asarray, tx.init(params))
    return jax.jit(mapped, donate_argnums=(0, 1)), jax.device_put([params, state], NamedSharding(mesh, mirrored))


def _by_hand(name: str, workload: Workload, num_replicas: int, combine: Callable[[Params], Params] | None = None) -> Contender:
    mesh = Mesh(np.array(jax.devices()[:num_replicas]), ("data",))
    compiled, (params, state) = by_hand_step(workload, mesh, combine)
    batches = itertools.cycle([jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data"))) for batch in workload.batches()])

    def run(num_steps: int) -> float:
        nonlocal params, state
        for x, y in itertools.islice(batches, num_steps):
            params, state, losses = compiled(params, state, x, y)
        jax.block_until_ready(params)
        return float(np.sum(losses))

    return Contender(name, run)


def all_of(workload: Workload, num_replicas: int) -> Sequence[Contender]:
    """Make all of them; the first is what the others are compared with."""
    return (
        by_hand(workload, num_replicas),
        with_mirrored(workload, num_replicas),
        with_mirrored(workload, num_replicas, shard_state=True),
        by_hand_packed(workload, num_replicas),
        on_one_device(workload),
    )
