"""A small convolutional network in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np


def initial_weights(key: jax.Array) -> dict[str, jax.Array]:
    """Return He-initialised kernels and zero biases of two convolutions and two dense layers."""
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense1": (4 * 4 * 32, 64), "dense2": (64, 10)}
    weights = {}
    for name, shape in shapes.items():
        key, own = jax.random.split(key)
        weights[name] = jax.random.normal(own, shape) * np.sqrt(2 / np.prod(shape[:-1]))
        weights[f"{name}_bias"] = jnp.zeros(shape[-1])
    return weights


def logits_of(weights: dict, images: jax.Array) -> jax.Array:
    """Apply the network to images of shape [n, 8, 8, 1]."""

    def convolve(x: jax.Array, name: str) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, weights[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + weights[f"{name}_bias"])

    x = convolve(convolve(images, "conv1"), "conv2")
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ weights["dense1"] + weights["dense1_bias"])
    return x @ weights["dense2"] + weights["dense2_bias"]
