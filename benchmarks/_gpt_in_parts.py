"""A GPT whose state is divided among devices: by `mirrored`, and by hand in three ways of plain JAX; compiled, never run.

`layer` gathers a layer's weights in bfloat16 where they are used, in a `jax.shard_map`; `start` gathers all weights at the begin
of a step; `constraints` is `jax.jit` on divided arrays, with a constraint where a weight is used. All compute in bfloat16, with
jax.checkpoint if asked for; their state, Adam's too, is float32 and donated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

WAYS = ("layer", "start", "constraints")
_ADAM = optax.adam(1e-3)
_HALF = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Gpt:
    """The sizes of a model, with `rows` on each device; its layers are separate arrays or one stack."""

    layers: int
    rows: int
    is_stacked: bool = False
    has_checkpoint: bool = True
    width: int = 2048
    vocabulary: int = 50304
    length: int = 1024
    heads: int = 16

    def __str__(self) -> str:
        kind = "stacked" if self.is_stacked else "separate"
        return f"{self.layers} {kind} layers, {self.rows} rows, {'' if self.has_checkpoint else 'no '}checkpoint"

    def parameters(self) -> Any:
        """Return the parameters' shapes."""
        wide = self.width
        matrices = {"qkv": (wide, 3 * wide), "out": (wide, wide), "up": (wide, 4 * wide), "down": (4 * wide, wide)}
        block = {**matrices, "a": (wide,), "b": (wide,)}
        outer = {"embedding": (self.vocabulary, wide), "position": (self.length, wide), "final": (wide,)}
        kind = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)  # noqa: E731
        one = {name: kind(*shape) for name, shape in block.items()}
        many = {name: kind(self.layers, *shape) for name, shape in block.items()}
        return {
            **{name: kind(*shape) for name, shape in outer.items()},
            "blocks": many if self.is_stacked else [one] * self.layers,
        }

    def losses(self, p: Any, x: Any, get: Callable[[Any], Any] = lambda a: a, policy: Any = None) -> Any:
        """Return the loss of each row; `get` makes a parameter usable where it is used."""

        def block(h: Any, w: Any) -> Any:
            w = jax.tree.map(get, w)
            parts = (_norm(h, w["a"]) @ w["qkv"].astype(_HALF)).reshape(*h.shape[:2], 3, self.heads, -1)
            mixed = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0), is_causal=True)
            h += mixed.reshape(h.shape) @ w["out"].astype(_HALF)
            return h + jax.nn.gelu(_norm(h, w["b"]) @ w["up"].astype(_HALF)) @ w["down"].astype(_HALF)

        if self.has_checkpoint or policy is not None:
            block = jax.checkpoint(block, policy=None if self.has_checkpoint else policy)
        h = get(p["embedding"]).astype(_HALF)[x] + get(p["position"]).astype(_HALF)
        if self.is_stacked:
            h, _ = jax.lax.scan(lambda h, w: (block(h, w), None), h, p["blocks"])
        else:
            h = functools.reduce(block, p["blocks"], h)

        def head(h: Any, table: Any) -> Any:
            logits = jnp.einsum("btd,vd->btv", h, get(table).astype(_HALF), preferred_element_type=jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], x[:, 1:])

        return jax.checkpoint(head)(_norm(h, get(p["final"])), p["embedding"]).mean(-1)


def _norm(h: Any, scale: Any) -> Any:
    return (h * jax.lax.rsqrt(jnp.mean(h.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6) * scale).astype(_HALF)


def with_mirrored(gpt: Gpt, devices: Any, storage: str) -> float:
    """Compile the library's step, and return its gigabytes on a device."""
    strategy = mr.MirroredStrategy(devices, storage=storage)
    with strategy.scope():
        w = mr.Variable(gpt.parameters(), name="w")
        optimizer = mr.Optimizer(_ADAM, w)
    [batch] = strategy.distribute_dataset([np.zeros((gpt.rows * len(devices), gpt.length), np.int32)])
    strategy.run(lambda x: optimizer.minimize(lambda: gpt.losses(w.value, x)), args=(batch,))
    return mr.plan(strategy).programs[-1].memory.peak / 1e9


def by_hand(gpt: Gpt, devices: Any, way: str) -> float:
    """Compile the step by hand, and return its gigabytes on a device."""
    mesh, count = Mesh(np.array(devices), ("data",)), len(devices)
    shapes = gpt.parameters()
    axis = lambda a: int(gpt.is_stacked and a.shape[:1] == (gpt.layers,))  # noqa: E731  # never that of the layers
    spec = lambda a: PartitionSpec(*[None] * axis(a), "data") if a.ndim else PartitionSpec()  # noqa: E731
    is_large = lambda a: a.ndim > 1 and a.size > gpt.width  # noqa: E731

    def gathered(a: Any, place: int = 0) -> Any:
        return checkpoint_name(
            jax.lax.all_gather(a.astype(_HALF) if is_large(a) else a, "data", axis=place, tiled=True), "gathered"
        )

    def on_whole(a: Any) -> Any:
        return jax.lax.with_sharding_constraint(a.astype(_HALF) if is_large(a) else a, NamedSharding(mesh, PartitionSpec()))

    def step(parameters: Any, state: Any, x: Any) -> Any:
        get = {"layer": gathered, "start": lambda a: a, "constraints": on_whole}[way]
        policy = jax.checkpoint_policies.save_anything_except_these_names("gathered") if way == "layer" else None
        total = lambda p: gpt.losses(p, x, get, policy).sum() / (gpt.rows * count)  # noqa: E731
        used = jax.tree.map(lambda a, s: gathered(a, axis(s)), parameters, shapes) if way == "start" else parameters
        loss, gradients = jax.value_and_grad(total)(used)
        if way == "start":
            scatter = lambda g, s: jax.lax.psum_scatter(g, "data", scatter_dimension=axis(s), tiled=True)  # noqa: E731
            gradients = jax.tree.map(lambda g, s: scatter(g, s).astype(np.float32), gradients, shapes)
        updates, state = _ADAM.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss if way == "constraints" else loss[None]

    state = jax.eval_shape(_ADAM.init, shapes)
    specs = jax.tree.map(spec, (shapes, state))
    placed = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s))  # noqa: E731
    x = placed(jax.ShapeDtypeStruct((gpt.rows * count, gpt.length), np.int32), PartitionSpec("data"))
    arguments = (*jax.tree.map(placed, (shapes, state), specs), x)
    if way == "constraints":
        outputs = jax.tree.map(lambda s: NamedSharding(mesh, s), (*specs, PartitionSpec()))
        return _gigabytes(jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs).lower(*arguments))
    data = PartitionSpec("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*specs, data), out_specs=(*specs, data), check_vma=False)
    return _gigabytes(jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments))


def _gigabytes(lowered: Any) -> float:
    sizes = lowered.compile().memory_analysis()
    written = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return (sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + written) / 1e9
