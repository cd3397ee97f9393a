"""Each public error and warning: a program that raises it. Writes the messages of docs/troubleshooting.md.

The messages are those of the source: a program of the table raises each, and `…` takes the place of its own names and numbers.
The page has the messages in the order of the table, and all that is said of them: a new one is a block with its first word.

Usage: python tests/troubleshooting.py
"""

import dataclasses
import gc
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_service import FakeClient
from strategies import TWO, ctx, variable

import mirrored as mr
from mirrored._cluster.meeting import meet
from mirrored._cluster.spec import Cluster, ClusterSpec
from mirrored._replicas import mesh
from mirrored._variables import equal_copies
from mirrored._workers import runtime
from mirrored._workers.coordination import Coordination
from mirrored._workers.same_program import require_same_history


class Message(NamedTuple):
    """A message of the page: who raises it, and the pattern of what is of this program in it."""

    error: str
    what: str
    program: Callable[[SimpleNamespace], Any]
    hide: str = "$^"


PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"(?<=```text\n)mirrored\..*?(?=\n```)", re.DOTALL)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class State:
    tx: optax.GradientTransformation


def given(monkeypatch: pytest.MonkeyPatch, folder: Path) -> SimpleNamespace:
    """Make what programs need: a strategy of two replicas, a variable, an optimizer, batches and a folder."""
    w = variable(np.zeros(2, np.float32), TWO, name="w")
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])
    batch, odd = TWO.distribute_dataset([np.arange(n, dtype=np.float32) for n in (4, 3)])
    run = lambda fn, *args: TWO.run(fn, args=args)  # noqa: E731
    names = {"monkeypatch": monkeypatch, "folder": folder, "batch": batch, "odd": odd, "run": run}
    return SimpleNamespace(strategy=TWO, w=w, optimizer=optimizer, **names)


def step_of(g, loss: Callable[[Any], Any], combine: bool = False) -> Callable[[Any], None]:
    def step(x):
        gradients = mr.grad(lambda: loss((g.w.value.sum() - x) ** 2), [g.w])()
        g.optimizer.apply_gradients(ctx().all_reduce("sum", gradients) if combine else gradients)

    return step


def two_workers(worker: int) -> Cluster:
    return Cluster(ClusterSpec.of({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}), "worker", worker)


def copies_differ(g):
    gc.collect()  # else the variable that another case has lost may still live, on the same devices
    arrays = [jax.device_put(np.float32([0, i]), device) for i, device in enumerate(g.strategy.devices)]
    g.w.assign(jax.make_array_from_single_device_arrays((2,), g.w.value.sharding, arrays))
    g.strategy.assert_mirrored()


def machines_differ(g):
    def exchange(_mesh, own):  # as if each of the two copies were on a worker of its own
        specs, words = own
        if words is None:
            return [own]
        first, second = ([[number, [copies[worker]]] for number, copies in specs] for worker in range(2))
        return [[first, ["avx2", "cpu", "fma"]], [second, ["cpu"]]]

    g.monkeypatch.setattr(equal_copies, "_exchange", exchange)
    copies_differ(g)


def in_a_mesh(g):
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        g.strategy.reduce("sum", g.batch)


def next_batch_in_a_step(g):
    iterator = iter(g.strategy.distribute_dataset([np.ones(4)]))
    g.run(lambda: next(iterator))


def closes_over_a_model(g):
    nnx = pytest.importorskip("flax.nnx")
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    g.run(lambda: norm(jnp.ones((2, 2))))


def a_program_fails(g):
    step = lambda x: g.w.assign_add(jnp.log(x))  # noqa: E731
    g.run(step, np.ones(2, np.float32))
    with jax.debug_nans(True), pytest.raises(RuntimeError):
        g.run(step, np.full(2, -1, np.float32))
    g.w.numpy()


def no_gpu(g):
    g.monkeypatch.setattr(jax, "devices", lambda *a, _devices=jax.devices: [] if "gpu" in a or "cuda" in a else _devices(*a))
    mr.MirroredStrategy(["gpu:31"])


def broken_accelerator(g):
    def fail(**_: object) -> None:
        raise RuntimeError("Unable to initialize backend 'cuda': no memory")

    g.monkeypatch.setattr(jax, "local_devices", fail)
    g.monkeypatch.setattr(mesh.distributed, "clear_backends", lambda: None)
    mr.MirroredStrategy()


def no_such_gpu(g, name: str = "CUDA_VISIBLE_DEVICES", value: str = "7"):
    before = jax.config.jax_platforms
    g.monkeypatch.setenv(name, value)
    g.monkeypatch.setattr(mesh, "_has_cuda", lambda: True)
    jax.config.update("jax_platforms", None)
    try:
        mr.MirroredStrategy()
    finally:
        jax.config.update("jax_platforms", before)


def no_task(g):
    g.monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    mr.TFConfigClusterResolver().cluster_spec()


def started_by_a_worker(g):
    g.monkeypatch.setenv("MIRRORED_WORKER", f"1 {runtime._name_of(two_workers(0))}")
    runtime.start(two_workers(0), mr.CommunicationOptions())


def different_barriers(g):
    client = FakeClient()
    workers = [Coordination(client, worker, 2) for worker in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(worker.barrier, f"end of {worker.worker}") for worker in workers]:
            future.result()


def another_shape(g):
    with mr.Checkpoint(str(g.folder / "c"), w=g.w) as checkpoint:
        checkpoint.save(1)
    with g.strategy.scope():
        other = mr.Variable(np.zeros(3, np.float32), name="w")
    mr.Checkpoint(str(g.folder / "c"), w=other).restore_latest()


def cut_short(g):
    path = g.folder / "a.tfrecord"
    mr.data.write_tfrecords(path, [b"abc"])
    path.write_bytes(path.read_bytes()[:8])
    list(mr.data.tfrecord_dataset(str(path)))


def a_state_that_differs(g):
    tx = optax.sgd(0.1)

    def step(params, state, x):
        grads = jax.grad(lambda params: jnp.mean((x * params["w"]) ** 2))(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(2)}
    g.run(step, params, tx.init(params), g.batch)


def summed_by_hand(loss, times=1):
    def step(x):
        gradient = jax.grad(lambda w: loss((x * w) ** 2))(1.0)
        return [gradient := ctx().all_reduce("sum", gradient) for _ in range(times)]

    return step


def one_row(g):
    [batch] = g.strategy.distribute_dataset([np.ones(1, np.float32)])
    return batch


def with_its_own_derivative(x, w):
    @jax.custom_jvp
    def both(x, w):
        return x * w, jnp.sin(w)

    both.defjvp(lambda primals, tangents: (both(*primals), tangents))
    rows, other = both(x, w)
    return ctx().all_reduce("sum", rows.sum()) + other


MESSAGES = [
    Message("ReplicasDivergeError", "own rows", lambda g: g.run(lambda x: g.w.assign(x), g.batch)),
    Message("ReplicasDivergeError", "a PerReplica", lambda g: g.w.assign(g.batch)),
    Message("ReplicasDivergeError", "copies differ", copies_differ,
        hide=r"\[1\]|0\.(?= They)|mr\.Variable\(.*"),
    Message("ReplicasDivergeError", "machines differ", machines_differ,
        hide=r"\[1\]|0\.(?= Programs)|mr\.Variable\(.*"),
    Message("CollectiveHangError", "under a condition", lambda g: g.run(
        lambda x: jax.lax.cond(x.sum() > 2, lambda: ctx().all_reduce("sum", x.sum()), lambda: 0.0), g.batch)),
    Message("FactorOfReplicasError", "reduced twice", lambda g: g.run(step_of(g, mr.losses.compute_average_loss, True), g.batch)),
    Message("FactorOfReplicasError", "summed twice", lambda g: g.run(summed_by_hand(mr.losses.compute_average_loss, 2), g.batch)),
    Message("UnevenReplicasError", "reduce", lambda g: g.strategy.reduce("sum", g.odd),
        hide=r"\(2,\), \(1,\)\."),
    Message("UnevenReplicasError", "all_reduce", lambda g: g.run(lambda x: ctx().all_reduce("sum", x), g.odd),
        hide=r"the replicas whose .*?\d\.(?= A )"),
    Message("UnevenReplicasError", "a mean over no rows", lambda g: g.run(
        summed_by_hand(lambda x: mr.losses.mean_over_own_rows(jnp.mean(x - ctx().all_gather(x, axis=0)))), one_row(g)),
        hide=r"the replicas whose .*?\d\.(?= A )"),
    Message("UnevenReplicasError", "a loss of two terms", lambda g: g.run(
        lambda x: mr.losses.compute_average_loss(jnp.stack([x.mean(), (x**2).mean()])), g.odd),
        hide=r"\(2, [12]\)"),
    Message("UnevenReplicasError", "a derivative from outside", lambda g: jax.grad(
        lambda w: g.run(with_its_own_derivative, g.odd, w))(1.0)),
    Message("PerReplicaError", "use as one array", lambda g: g.batch + 1,
        hide=r"`\+`|\(2,\)"),
    Message("PerReplicaError", "vmap of run", lambda g: g.strategy.reduce("sum", jax.vmap(
        lambda k: g.run(lambda x, k: x * k, g.batch, k))(jnp.ones(2)))),
    Message("OneProgramError", "branch", lambda g: g.run(lambda x: x if ctx().replica_id_in_sync_group == 0 else -x, g.batch)),
    Message("OneProgramError", "float", lambda g: g.run(lambda x: float(x.sum()), g.batch)),
    Message("ContextError", "read under jit", lambda g: jax.jit(lambda: g.w * 2)()),
    Message("ContextError", "gather in a step", lambda g: g.run(lambda: g.strategy.gather(g.w.value, axis=0))),
    Message("ContextError", "create in a step", lambda g: g.run(lambda: mr.Variable(0.0, name="made"))),
    Message("ContextError", "next batch in a step", next_batch_in_a_step),
    Message("ContextError", "loss outside", lambda g: mr.losses.compute_average_loss(np.ones(3))),
    Message("ContextError", "another mesh", in_a_mesh,
        hide=r"\{.*?\}"),
    Message("ContextError", "a map over devices", lambda g: g.run(lambda: jax.pmap(lambda x: x)(jnp.ones((1, 2))))),
    Message("ContextError", "an NNX object", closes_over_a_model,
        hide=r"BatchStat(?=\))"),
    Message("StrategyMismatchError", "batch", lambda g: mr.MirroredStrategy(["cpu:0"]).run(lambda x: x, args=(g.batch,)),
        hide=r"2(?= rep)|1(?=;)"),
    Message("StrategyMismatchError", "variable", lambda g: mr.MirroredStrategy(["cpu:0"]).run(lambda: g.w.value),
        hide=r"(?<=on )\d rep.*?\)(?=,|\.)|mr\.Mirr.*?\)\)"),
    Message("VariableLostError", "a program fails", a_program_fails,
        hide=r"(?<=failed \().*?\.(?=\)\.)"),
    Message("PlanError", "an unknown topology", lambda g: mr.topology("v5e:16"),
        hide=r"(?<=')v5e:16(?=';)|'v5e:16x16', .*?\.(?= A)"),
    Message("DeviceError", "twice", lambda g: mr.MirroredStrategy(["cpu:0", "cpu:0"]),
        hide=r"cpu:0(?= twice)|(?<=')cpu:0(?=' and|'\. )"),
    Message("DeviceError", "no gpu", no_gpu,
        hide=r"gpu:31|cpu:0, cpu.*?\.(?= L)"),
    Message("DeviceError", "does not start", broken_accelerator,
        hide=r"Unable.*?\.(?= N)"),
    Message("DeviceError", "no such gpu", no_such_gpu,
        hide=r"(?<=is ')7"),
    Message("DeviceError", "no gpu of the launcher", lambda g: no_such_gpu(g, "MIRRORED_GPUS", "1"),
        hide=r"1 GPU(?= in)|0\.(?= N)|Run it.*?\.(?= To)"),
    Message("DeviceError", "too late", lambda g: mr.MirroredStrategy(["cpu:99"]),
        hide=r"cpu:99|. cpu dev.*?\.(?= CPU)|100(?= in)"),
    Message("ClusterConfigError", "no task", no_task),
    Message("ClusterConfigError", "started by a worker", started_by_a_worker,
        hide=r"1(?=, which)|0 of 2.*?(?= already)"),
    Message("ClusterStartError", "jax has started", lambda g: mr.MultiWorkerMirroredStrategy(
        mr.SimpleClusterResolver({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=0))),
    Message("ClusterStartError", "no chief", lambda g: meet(two_workers(1), {}, 0.05),
        hide=r"worker 1|0 s(?= for)|127\.0\.0\.1:1|Connection refused\.|the arguments"),
    Message("WorkerLostError", "does not come", lambda g: Coordination(FakeClient(), 0, 2).exchange(
        "end", 1, timeout_seconds=0.05),
        hide=r"(?<=')end|(?<=worker )0"),
    Message("WorkerLostError", "different barriers", different_barriers,
        hide=r"(?<=')end of \d"),
    Message("ProgramMismatchError", "more batches", lambda g: require_same_history([["2", "x"], ["1", "y"]], list),
        hide=r"worker 0: 2; worker 1: 1\."),
    Message("CheckpointError", "another shape", another_shape,
        hide=r"1(?= in)|w(?= is)"),
    Message("TFRecordError", "cut short", cut_short,
        hide=r"0(?=, at|:)|4(?= bytes)"),
    Message("FactorOfReplicasWarning", "nobody has said", lambda g: g.run(step_of(g, jnp.mean), g.batch)),
    Message("FactorOfReplicasWarning", "nobody has said, of a sum by hand", lambda g: g.run(summed_by_hand(jnp.mean), g.batch)),
    Message("FactorOfReplicasWarning", "a root of a share", lambda g: g.run(
        summed_by_hand(lambda x: jnp.sqrt(mr.losses.compute_average_loss(x))), g.batch)),
    Message("FactorOfReplicasWarning", "whole batch", lambda g: g.run(step_of(g, jnp.mean), np.ones(4, np.float32)),
        hide=r"(?<=all )2|2(?= times)"),
    Message("FactorOfReplicasWarning", "weight decay", lambda g: g.run(
        lambda w, x: ctx().all_reduce("sum", 0.1 * w + jax.grad(lambda w: jnp.mean(x * w))(w)), 1.0, g.batch)),
    Message("FactorOfReplicasWarning", "mean of shares", lambda g: g.run(
        lambda x: ctx().all_reduce("mean", mr.losses.compute_average_loss(x)), g.batch)),
    Message("ReplicasDivergeWarning", "a state that differs", a_state_that_differs,
        hide=r"a_state\S+|1(?= of)|result\[0\]\['w'\]"),
    Message("SameNoiseWarning", "dropout", lambda g: g.run(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), g.odd)),
    Message("UnevenReplicasWarning", "outside", lambda g: g.strategy.reduce("mean", g.run(jnp.mean, g.odd))),
    Message("RecompilationWarning", "new shapes", lambda g: [
        g.run(step, np.ones(rows, np.float32)) for step in [lambda x: x.shape[0]] for rows in range(1, 30)],
        hide=r"<lambda>\S+|9(?= times)|(?<=shape )\(.*?32|(?<=to )\(.*?32"),
    Message("RecompilationWarning", "new lengths", lambda g: [
        g.run(step, np.ones((2, length), np.float32)) for step in [lambda x: x.shape[1]] for length in range(1, 30)],
        hide=r"<lambda>\S+|9(?= times)|(?<=shape )\(.*?32|(?<=to )\(.*?32"),
    Message("RecompilationWarning", "new transformations", lambda g: [
        g.run(step, State(optax.sgd(0.1))) for step in [lambda state: None] for _ in range(10)],
        hide=r"<lambda>\S+|9(?= times)|(?<=shape )\(.*?32|(?<=to )\(.*?32"),
]  # fmt: skip
#: What is of the program in each message: places in files, the names of variables, and R.
_HIDDEN = rf"{re.escape(__file__)}:\d+|(?<=')(w|made)(?=')|(?<=R = )\d+"


def raised(message: Message, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Run a message's program; return what is printed then, as the page has it."""
    home = mr.data if message.error == "TFRecordError" else mr
    with pytest.raises(getattr(home, message.error)) as caught, warnings.catch_warnings():
        warnings.simplefilter("error")
        message.program(given(monkeypatch, folder))
    text = re.sub(message.hide, "…", str(caught.value), flags=re.DOTALL)
    text = re.sub(rf"{_HIDDEN}|{re.escape(str(folder))}[\w/.]*\w", "…", f"{home.__name__}.{message.error}: {text}").replace(
        "….", "…"
    )
    lines = [line if line.startswith("    ") else textwrap.fill(line, 140, break_long_words=False, break_on_hyphens=False)
             for line in text.splitlines()]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    texts = []
    for message in MESSAGES:
        with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
            texts.append(raised(message, monkeypatch, Path(folder)))
    PAGE.write_text(BLOCK.sub(lambda _: texts.pop(0), PAGE.read_text()))


if __name__ == "__main__":
    main()
