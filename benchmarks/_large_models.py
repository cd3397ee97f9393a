"""Models of a size that fills a GPU: GPT with 111 million parameters, and ResNet-50."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train: its parameters, the losses of rows, and the rows of one device."""

    name: str
    params: Any
    losses: Callable[[Any, Any], jax.Array]
    rows: Any
    tx: optax.GradientTransformation


def gpt(
    vocabulary: int = 32768,
    length: int = 512,
    width: int = 768,
    heads: int = 12,
    layers: int = 12,
    rows: int = 16,
    again: Callable[..., Any] = lambda function: function,
) -> Model:
    """Make a GPT, computed in bfloat16, with parameters in float32; `again`, such as `jax.checkpoint`, is for blocks and head."""
    rng = np.random.default_rng(0)
    wide = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    normal = lambda *shape: (rng.standard_normal(shape) * 0.02).astype(np.float32)  # noqa: E731
    scales = lambda: {name: np.ones(width, np.float32) for name in ("a", "b")}  # noqa: E731
    blocks = [{name: normal(*shape) for name, shape in wide.items()} | scales() for _ in range(layers)]
    params = {"embedding": normal(vocabulary, width), "position": normal(length, width), "blocks": blocks}
    attend = "cudnn" if jax.default_backend() == "gpu" else None

    def half(array: jax.Array) -> jax.Array:
        return array.astype(jnp.bfloat16)

    def norm(h: jax.Array, scale: jax.Array) -> jax.Array:
        return half(h * jax.lax.rsqrt(jnp.mean(jnp.square(h.astype(jnp.float32)), -1, keepdims=True) + 1e-6) * scale)

    @again
    def after(h: jax.Array, block: dict[str, jax.Array]) -> jax.Array:
        q, k, v = jnp.moveaxis((norm(h, block["a"]) @ half(block["qkv"])).reshape(*h.shape[:2], 3, heads, -1), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attend)
        h += attended.reshape(h.shape) @ half(block["out"])
        return h + jax.nn.gelu(norm(h, block["b"]) @ half(block["up"])) @ half(block["down"])

    @again
    def head(h: jax.Array, embedding: jax.Array, y: jax.Array) -> jax.Array:
        logits = (h @ half(embedding).T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(-1)

    def losses(params: Any, tokens: jax.Array) -> jax.Array:
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = half(params["embedding"])[x] + half(params["position"])
        for block in params["blocks"]:
            h = after(h, block)
        return head(h, params["embedding"], y)

    tokens = rng.integers(0, vocabulary, (rows, length + 1), np.int32)
    millions = sum(array.size for array in jax.tree.leaves(params)) / 1e6
    return Model(f"GPT, {millions:.0f} M parameters, {rows} x {length} tokens", params, losses, tokens, optax.adamw(1e-4))


def resnet(stages: Sequence[int] = (3, 4, 6, 3), size: int = 224, rows: int = 128, dtype: Any = jnp.bfloat16) -> Model:
    """Make a ResNet, whose BatchNorm layers use the statistics of all rows."""
    import flax.linen as nn

    conv = functools.partial(nn.Conv, use_bias=False, dtype=dtype)
    norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=dtype)

    class Block(nn.Module):
        filters: int
        strides: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
            y = nn.relu(norm()(conv(self.filters, (3, 3), (self.strides,) * 2)(y)))
            y = norm()(conv(4 * self.filters, (1, 1))(y))
            if x.shape != y.shape:
                x = norm()(conv(4 * self.filters, (1, 1), (self.strides,) * 2)(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(norm()(conv(64, (7, 7), (2, 2))(x.astype(dtype) / 255)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for stage, num_blocks in enumerate(stages):
                for number in range(num_blocks):
                    x = Block(64 * 2**stage, 2 if stage and not number else 1)(x)
            return nn.Dense(1000)(x.mean((1, 2)).astype(jnp.float32))

    rng, net = np.random.default_rng(0), ResNet()
    pictures, labels = rng.integers(0, 255, (rows, size, size, 3), np.uint8), rng.integers(0, 1000, rows, np.int32)
    params = jax.tree.map(np.asarray, jax.jit(net.init)(jax.random.key(0), pictures[:2])["params"])

    def losses(params: Any, batch: Any) -> jax.Array:
        pictures, labels = batch
        logits, _ = net.apply({"params": params}, pictures, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    name = f"ResNet of {1 + 3 * sum(stages)} convolutions, {jnp.dtype(dtype)}, {rows} pictures of {size} x {size}"
    return Model(name, params, losses, (pictures, labels), optax.sgd(0.1, 0.9))
