"""What does `mirrored` cost on this machine's GPUs, next to the same by hand? In at most five minutes; a CPU is for trying it.

Peak memory of GPT with 111 million parameters; the small workloads of the other benchmarks; GPT and ResNet-50 in bfloat16, on
one device, with four replicas on it, and on all devices; ResNet-50 fed from host memory, and in PyTorch where that is installed;
`mr.scan`; Flax NNX and Keras' `fit` where these are; a checkpoint of 256 MiB. docs/speed.md has the figures of one H200.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _jax_contenders
import _peers
import jax
import loop
import numpy as np
import optax
from _harness import Contender, Row, check_losses, interleave, parse, print_table, show_seconds
from _large_models import Model, gpt, resnet
from _workloads import WORKLOADS
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mirrored as mr

#: Of float32 values, which a checkpoint holds.
MEBIBYTES = 256


def main() -> None:
    options = parse(__doc__, rounds=5, turn=0.5, only="", peak="")
    if options.peak:
        print(peak(options.peak, options.quick))
        return
    # A process of its own tells: this one would take the device's memory, which `memory` leaves to others.
    asked = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend())"], stdout=subprocess.PIPE, text=True)
    if asked.stdout.strip() == "cpu" and not options.quick:
        print("skipped: JAX has found no GPU and no TPU here; --quick tries it on the CPU")
        return
    parts = {part.__name__: part for part in (memory, small, transformer, scan, libraries, checkpoint, convolutions)}
    for name in options.only.split(",") if options.only else parts:
        start = time.perf_counter()
        parts[name](options)
        print(f"{name} took {time.perf_counter() - start:.0f} s", flush=True)


def memory(options: argparse.Namespace) -> None:
    """Ask processes of their own, before this one takes the device's memory."""
    names = ("by hand", "mirrored")
    quick = ["--quick"] if options.quick else []
    started = [
        subprocess.Popen([sys.executable, __file__, f"--peak={name}", *quick], stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    rows = [Row(name, process.communicate()[0].split("\n")[-2]) for name, process in zip(names, started, strict=True)]
    devices = jax.local_devices()
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    print_table("peak memory of GPT on one device", rows)


def peak(name: str, is_quick: bool) -> str:
    """Train one contender, and say what its device held at most."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # two processes share the device
    [device, *_] = jax.local_devices()
    make = {"by hand": by_hand, "mirrored": ours}[name]
    make(the_gpt(is_quick), [device]).run(3)
    statistics = device.memory_stats()
    return f"{statistics['peak_bytes_in_use'] / 2**20:.0f} MiB" if statistics else "not told"


def small(options: argparse.Namespace) -> None:
    [device, *_] = jax.local_devices()
    for name in ("W1",) if options.quick else ("W1", "W2", "W3", "W4"):
        workload = WORKLOADS[name]
        hand = _jax_contenders.on_one_device(workload)
        mirrored = _jax_contenders.with_strategy("", mr.MirroredStrategy([device]), workload)
        contenders = [Contender(f"{name} by hand", hand.run), Contender(f"{name} mirrored", mirrored.run)]
        compare(f"{name} on one device", contenders, options)


def transformer(options: argparse.Namespace) -> None:
    on_devices(the_gpt(options.quick), options, ("together", "one_by_one"))


def convolutions(options: argparse.Namespace) -> None:
    if is_installed("flax"):
        model = resnet(stages=(1,), size=32, rows=4) if options.quick else resnet()
        fed = [fed_by_hand(model), fed_with_mirrored(model)]
        compare(f"{model.name}, from host memory", fed, options)
        with peers(options) as others:
            on_devices(model, options, ("together",), others)


@contextlib.contextmanager
def peers(options: argparse.Namespace) -> Iterator[list[Contender]]:
    """Start PyTorch's ResNet-50, if this Python has PyTorch, for the duration of a block."""
    if not (is_installed("torch") and is_installed("torchvision")):
        print("skipped: PyTorch, which is not installed")
        yield []
        return
    size = ["4", "32"] if options.quick else []
    command = [sys.executable, str(Path(__file__).with_name("peer_torch_resnet.py")), *size]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield [Contender("PyTorch", _peers.remote(process))]


def scan(options: argparse.Namespace) -> None:
    """Scan 16 steps of W2, the loss of each reduced."""
    [device, *_] = jax.local_devices()
    hand = loop.by_hand(WORKLOADS["W2"], Mesh(np.array([device]), ("data",)))
    mirrored = loop.with_mirrored(WORKLOADS["W2"], mr.MirroredStrategy([device]))
    named = {contender.name: contender for contender in (*hand, *mirrored)}
    names = ("lax.scan by hand", "mr.scan", "by hand", "run, then reduce", "mr.function")
    compare("16 steps of W2", [named[name] for name in names], options)


def libraries(options: argparse.Namespace) -> None:
    if is_installed("flax") and is_installed("keras"):
        import libraries
        import models

        strategy = mr.MirroredStrategy(jax.local_devices()[:1])
        compare("Flax NNX, an MLP", libraries.with_nnx(strategy), options)
        compare("Flax NNX, convolutions with BatchNorm", models.with_nnx(models.CONVOLUTIONS, strategy), options)
        compare("Keras' fit, 16 batches, an MLP", libraries.with_keras(strategy), options)


def checkpoint(options: argparse.Namespace) -> None:
    """Save random numbers, and read them back."""
    shape = (1 if options.quick else MEBIBYTES, 2**18)
    with mr.MirroredStrategy(jax.local_devices()[:1]).scope():
        w = mr.Variable(np.random.default_rng(0).standard_normal(shape, np.float32))
    seconds: dict[str, list[float]] = {"blocked by a save": [], "saved": [], "restored": []}
    for _ in range(2 if options.quick else 4):
        with tempfile.TemporaryDirectory() as folder:
            saved = mr.Checkpoint(folder, w=w)
            start = time.perf_counter()
            saved.save(1)
            seconds["blocked by a save"].append(time.perf_counter() - start)
            saved.wait()
            seconds["saved"].append(time.perf_counter() - start)
            start = time.perf_counter()
            saved.restore_latest()
            seconds["restored"].append(time.perf_counter() - start)
    rows = [Row(what, f"{show_seconds(min(taken))} to {show_seconds(max(taken))}") for what, taken in seconds.items()]
    print_table(f"a checkpoint of {w.numpy().nbytes / 2**20:.0f} MiB", rows)


def compare(title: str, contenders: Sequence[Contender], options: argparse.Namespace, others: Sequence[Contender] = ()) -> None:
    """Time first steps, check the losses, take turns, and show each one's time and its ratio to the first.

    Other frameworks begin with random numbers of their own, so their losses are not compared.
    """
    rounds, turn = (2, 0.0) if options.quick else (options.rounds, options.turn)
    firsts = {}
    for contender in (*contenders, *others):
        start = time.perf_counter()
        contender.run(1)
        firsts[contender.name] = time.perf_counter() - start
    check_losses(contenders, 1, 0.02)
    times = interleave([*contenders, *others], rounds, turn)
    rows = []
    for name, first in firsts.items():
        seconds, ratios = times.median(name), times.ratios(name, contenders[0].name)
        rows.append(Row(f"{name} (first {show_seconds(first)})", show_seconds(seconds), ratios, seconds=seconds))
    print_table(f"{title}; ratio to {contenders[0].name}", rows)


def on_devices(model: Model, options: argparse.Namespace, schedules: Sequence[str], others: Sequence[Contender] = ()) -> None:
    """Compare on one device, with replicas that share it, and on all devices."""
    devices = jax.local_devices()
    sharing = [ours(model, devices[:1], f"4 replicas, {each}", num_replicas=4, schedule=each) for each in schedules]
    on_one = [by_hand(model, devices[:1]), ours(model, devices[:1]), *sharing]
    compare(f"{model.name} on one device", on_one, options, others)
    if len(devices) > 1:
        both = [by_hand(model, devices), ours(model, devices)]
        compare(f"{model.name} on {len(devices)} devices", both, options)


def ours(model: Model, devices: Sequence[jax.Device], name: str = "mirrored", **how: Any) -> Contender:
    """Train with a strategy; all replicas of a device share the rows of one."""
    strategy = mr.MirroredStrategy(devices, **how)
    step = step_of(model, strategy)
    [batch] = strategy.distribute_dataset([for_devices(model.rows, len(devices))])

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = strategy.run(step, args=(batch,))
        return float(strategy.reduce("sum", loss))

    return Contender(name, run)


def fed_with_mirrored(model: Model) -> Contender:
    strategy = mr.MirroredStrategy(jax.local_devices()[:1])
    step = step_of(model, strategy)

    def run(num_steps: int) -> float:
        for batch in strategy.distribute_dataset([model.rows] * num_steps):
            loss = strategy.run(step, args=(batch,))
        return float(strategy.reduce("sum", loss))

    return Contender("mirrored", run)


def step_of(model: Model, strategy: mr.Strategy) -> Callable[[Any], jax.Array]:
    with strategy.scope():
        params = mr.Variable(jax.tree.map(np.copy, model.params))
        optimizer = mr.Optimizer(model.tx, params)

    def step(batch: Any) -> jax.Array:
        loss, gradients = mr.value_and_grad(lambda: model.losses(params.value, batch), params)()
        optimizer.apply_gradients(gradients)
        return loss

    return step


def by_hand(model: Model, devices: Sequence[jax.Device]) -> Contender:
    """`jit(shard_map)` with one psum of the gradient tree."""
    call, split = step_by_hand(model, devices)
    batch = jax.device_put(for_devices(model.rows, len(devices)), split)
    return Contender("by hand", lambda num_steps: float([call(batch) for _ in range(num_steps)][-1]))


def fed_by_hand(model: Model) -> Contender:
    """The same, with the next batch on its way meanwhile."""
    call, split = step_by_hand(model, jax.local_devices()[:1])

    def run(num_steps: int) -> float:
        batches = (jax.device_put(model.rows, split) for _ in range(num_steps))
        for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
            del following  # it is on its way
            loss = call(batch)
        return float(loss)

    return Contender("by hand", run)


def step_by_hand(model: Model, devices: Sequence[jax.Device]) -> tuple[Callable[[Any], jax.Array], NamedSharding]:
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
    held = jax.device_put(
        (jax.tree.map(np.copy, model.params), jax.tree.map(np.asarray, model.tx.init(model.params))),
        NamedSharding(mesh, mirrored),
    )

    def call(batch: Any) -> jax.Array:
        nonlocal held
        *held, loss = compiled(*held, batch)
        return loss

    return call, NamedSharding(mesh, split)


def for_devices(rows: Any, count: int) -> Any:
    """Give each device the same rows."""
    return jax.tree.map(lambda array: np.concatenate([array] * count), rows)


def the_gpt(is_quick: bool) -> Model:
    return gpt(vocabulary=64, length=16, width=32, heads=2, layers=2, rows=8) if is_quick else gpt()


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    main()
