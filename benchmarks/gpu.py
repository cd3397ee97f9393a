"""What do steps cost on this machine's GPUs, next to the same by hand? In at most five minutes; a CPU is for trying it.

The small workloads of the other benchmarks, GPT with 124 million parameters in bfloat16, and ResNet-50 (needs flax), on one GPU;
both again with four replicas on it; and with several GPUs on all of them. docs/speed.md has the figures of one H200.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _jax_contenders
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from _workloads import WORKLOADS
from jax.sharding import NamedSharding, PartitionSpec

import mirrored as mr


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train: its parameters, the losses of rows, and the rows of one device."""

    name: str
    params: Any
    losses: Callable[[Any, Any], jax.Array]
    rows: Any
    tx: optax.GradientTransformation


def main() -> None:
    options = parse(__doc__, rounds=8, turn=1.0)
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    devices = jax.local_devices()
    if devices[0].platform == "cpu" and not options.quick:
        print("skipped: JAX has found no GPU and no TPU here; --quick tries it on the CPU")
        return
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    small = list(of_workloads(devices[0], options.quick))
    print_table(
        "small steps on one device; figure: ratio to by hand", [row for pair in small for row in compare(pair, rounds, turn)]
    )
    for model in models(options.quick):
        contenders = [by_hand(model, devices[:1]), ours(model, devices[:1]), *several_replicas(model, devices[0])]
        print_table(f"{model.name} on one device; figure: ratio to by hand", compare(contenders, rounds, turn))
        if len(devices) > 1:
            both = [by_hand(model, devices), ours(model, devices)]
            print_table(f"{model.name} on {len(devices)} devices; figure: ratio to by hand", compare(both, rounds, turn))


def compare(contenders: Sequence[Contender], num_rounds: int, turn: float) -> list[Row]:
    """Check the losses, take turns, and show each one's time and its ratio to the first."""
    check_losses(contenders, 1, 0.02)
    times = interleave(contenders, num_rounds, turn)
    first = contenders[0].name
    return [
        Row(each.name, show_seconds(times.median(each.name)), times.ratios(each.name, first), seconds=times.median(each.name))
        for each in contenders
    ]


def of_workloads(device: jax.Device, is_quick: bool) -> Iterator[list[Contender]]:
    for name in ("W1",) if is_quick else ("W1", "W2", "W3", "W4"):
        workload = WORKLOADS[name]
        hand = _jax_contenders.on_one_device(workload)
        mirrored = _jax_contenders.with_strategy("", mr.MirroredStrategy([device]), workload)
        yield [Contender(f"{name} by hand", hand.run), Contender(f"{name} mirrored", mirrored.run)]


def ours(model: Model, devices: Sequence[jax.Device], name: str = "mirrored", **how: Any) -> Contender:
    """Train with a strategy; all replicas of a device share the rows of one."""
    strategy = mr.MirroredStrategy(devices, **how)
    with strategy.scope():
        params = mr.Variable(jax.tree.map(np.copy, model.params))
        optimizer = mr.Optimizer(model.tx, params)

    def step(batch: Any) -> jax.Array:
        loss, gradients = mr.value_and_grad(lambda: model.losses(params.value, batch), params)()
        optimizer.apply_gradients(gradients)
        return loss

    [batch] = strategy.distribute_dataset([for_devices(model.rows, len(devices))])

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(step, args=(batch,))
        return float(strategy.reduce("sum", loss))

    return Contender(name, run)


def several_replicas(model: Model, device: jax.Device) -> Iterator[Contender]:
    for schedule in ("together", "one_by_one") if model.name.startswith("GPT") else ("together",):
        yield ours(model, [device], f"4 replicas, {schedule}", num_replicas=4, schedule=schedule)


def by_hand(model: Model, devices: Sequence[jax.Device]) -> Contender:
    """`jit(shard_map)` with one psum of the gradient tree."""
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    mirrored, split = PartitionSpec(), PartitionSpec("data")

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        num_rows = len(devices) * len(jax.tree.leaves(model.rows)[0])
        loss, gradients = jax.value_and_grad(lambda params: model.losses(params, batch).sum() / num_rows)(params)
        total, gradients = jax.lax.psum((loss, gradients), "data")
        updates, state = model.tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, total

    specs = {"in_specs": (mirrored, mirrored, split), "out_specs": mirrored, "check_vma": False}
    compiled = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=(0, 1))
    everywhere = NamedSharding(mesh, mirrored)
    held = jax.device_put(
        (jax.tree.map(np.copy, model.params), jax.tree.map(np.asarray, model.tx.init(model.params))), everywhere
    )
    batch = jax.device_put(for_devices(model.rows, len(devices)), NamedSharding(mesh, split))

    def run(num_steps: int) -> float:
        nonlocal held
        for _ in range(num_steps):
            *held, loss = compiled(*held, batch)
        return float(loss)

    return Contender("by hand", run)


def for_devices(rows: Any, count: int) -> Any:
    """Give each device the same rows."""
    return jax.tree.map(lambda array: np.concatenate([array] * count), rows)


def models(is_quick: bool) -> Iterator[Model]:
    yield gpt(vocabulary=64, length=16, width=32, heads=2, layers=2, rows=8) if is_quick else gpt()
    if importlib.util.find_spec("flax") is not None:
        yield resnet(stages=(1,), size=32, rows=4) if is_quick else resnet()


def gpt(vocabulary: int = 32768, length: int = 512, width: int = 768, heads: int = 12, layers: int = 12, rows: int = 16) -> Model:
    """Make a GPT, computed in bfloat16, with parameters in float32."""
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

    def losses(params: Any, tokens: jax.Array) -> jax.Array:
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = half(params["embedding"])[x] + half(params["position"])
        for block in params["blocks"]:
            q, k, v = jnp.moveaxis((norm(h, block["a"]) @ half(block["qkv"])).reshape(*x.shape, 3, heads, -1), 2, 0)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attend)
            h += attended.reshape(h.shape) @ half(block["out"])
            h += jax.nn.gelu(norm(h, block["b"]) @ half(block["up"])) @ half(block["down"])
        logits = (h @ half(params["embedding"]).T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(-1)

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


if __name__ == "__main__":
    main()
