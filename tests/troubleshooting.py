"""Each public error and warning: a program that raises it, its cause and cure. Writes docs/troubleshooting.md.

The messages are those of the source: a program of the table raises each, and `…` takes the place of its own names and numbers.

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
    """A message of the page: who raises it, the pattern of what is of this program in it, and what the page says below it."""

    error: str
    what: str
    program: Callable[[SimpleNamespace], Any]
    hide: str = "$^"
    text: str = ""


PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
HEAD = """\
<!-- Written by: python tests/troubleshooting.py -->

# Troubleshooting

Search for a few words of your message. `…` stands for names and numbers of your program. Every error and warning
({doc}`api/errors`) is here, with its most frequent messages. If no cure follows a message, the message itself has the line to
write.

## Symptoms without a message

### The loss or the update is R times too large or too small

Return one undivided loss per example from the function given to `mr.value_and_grad`, or name a scalar's divisor
({doc}`concepts/losses`). {doc}`recipes/check-loss-scaling` measures the factor; a
[FactorOfReplicasWarning](#factorofreplicaswarning) reports most mistakes.

### Out of memory

A step that does not fit into an accelerator raises a [DeviceError](#deviceerror) before it runs, which says what takes the
memory. A step that does not fit beside other arrays raises XLA's `RESOURCE_EXHAUSTED: Out of memory`, and the variables that it
was overwriting are [lost](#variablelosterror).

Each device holds all parameters, all of the optimizer's state, and the activations of its rows:

* **Parameters and state**: `mr.MirroredStrategy(storage="parts")` keeps 1/R of them on each device ({doc}`large_models`).
* **Activations**: `mr.MirroredStrategy(num_replicas=..., schedule="one_by_one")` computes the batch in parts
  ({doc}`recipes/accumulation`). bfloat16 halves them ({doc}`recipes/mixed-precision`). `jax.checkpoint` recomputes them.
* **Optimizer state alone**: `mr.Optimizer(tx, variables, shard_state=True)` keeps 1/R on each device ({doc}`sharded-update`).
* **Two states**: a step that takes and returns a train state or a module holds the old and the new one. A `mr.Variable` is
  updated in place ({doc}`model-libraries`).
* **Batches**: two wait on the device. `mr.InputOptions(prefetch=1)` keeps one.
* **Another process**: JAX reserves [75 % of a GPU](gpu.md#gpus), in a notebook until its kernel ends. `nvidia-smi` shows who
  uses the rest.

### A halved batch: each replica sees fewer rows than you asked for

`batch(32)` is the *global* batch, as in `tf.distribute`: two replicas get 16 rows each. For 32 rows on each replica, write
`batch(32 * strategy.num_replicas_in_sync)`, and think about the learning rate.

### It is no faster than one device

Virtual CPU devices (`"cpu:0"`, `"cpu:1"`, …) share one processor and exist for tests. On accelerators, {doc}`recipes/profiling`
finds compilations, communication and waits.

### Most of the time is "between the steps"

`float(loss)`, `print(loss)` and `np.asarray(loss)` wait there for the devices. Read the loss every hundred steps ([what else
counts](seeing-a-run.md#as-text)).

### The first steps take long

The first step is compiled, and a smaller last batch compiles it again. A {doc}`compilation cache <recipes/compilation-cache>`
keeps programs for the next run. To compile once, drop the last batch: `.batch(n, drop_remainder=True)` of grain or a numpy
dataset, `drop_last=True` of a torch DataLoader. If a later step takes as long, `strategy.explain()` says why
([RecompilationWarning](#recompilationwarning)).

### The first step waits, and a worker "cannot reach" another

Some seconds after the workers have met, two of them log:

```text
worker 2 cannot reach worker 0 at 10.0.0.1:41234 (4 tries): nobody answers there, as where a firewall drops the
packets. Open all TCP ports between the hosts of the workers: collectives listen at ports that the kernel chooses, of
net.ipv4.ip_local_port_range.
```

The job ends with the same sentence after `timeout_seconds`, or after 131 s.

* **Cause**: a firewall, a security group or a NetworkPolicy admits only the port of worker 0, not [those of
  collectives](security.md#open-ports).

### You suspect that replicas differ

The library compares the real copies before each save and periodically, and `strategy.assert_mirrored()` at once, on all workers
([ReplicasDivergeError](#replicasdivergeerror)). {doc}`design/mirror-proof` says why a step cannot make them differ.

### The program waits at the start

The strategy waits for all workers. It logs the missing ones after 10 s, 20 s, 40 s and so on:
[ClusterStartError](#clusterstarterror).
"""


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
    Message("ReplicasDivergeError", "own rows", lambda g: g.run(lambda x: g.w.assign(x), g.batch), text="""
* **Cause**: the step assigns a value of this replica's rows, such as its own gradient ({doc}`concepts/variables`).
"""),
    Message("ReplicasDivergeError", "a PerReplica", lambda g: g.w.assign(g.batch)),
    Message("ReplicasDivergeError", "copies differ", copies_differ,
        hide=r"\[1\]|0\.(?= They)|mr\.Variable\(.*", text="""
* **Cure**: if the error returns with the same device, take it out of service. Else look for another library that writes to an
  array.
"""),
    Message("ReplicasDivergeError", "machines differ", machines_differ,
        hide=r"\[1\]|0\.(?= Programs)|mr\.Variable\(.*", text="""
* **Cause**: XLA compiles for each worker's own CPU or GPU. Worker 0 has warned [at the start](workers.md#the-start).
* **Cure**: `AVX2` suits CPUs with and without AVX-512. Without AVX2, write `SSE4_2`.
"""),
    Message("CollectiveHangError", "under a condition", lambda g: g.run(
        lambda x: jax.lax.cond(x.sum() > 2, lambda: ctx().all_reduce("sum", x.sum()), lambda: 0.0), g.batch), text="""
* **Cause**: the optimizer, or an `all_reduce`, is in a condition or a loop of this kind.
* **Cure**: combine the condition first: `jax.lax.cond(ctx.all_reduce("sum", x.sum()) > 2, …)`.
"""),
    Message("FactorOfReplicasError", "reduced twice", lambda g: g.run(step_of(g, mr.losses.compute_average_loss, True), g.batch),
        text="""
* **Cure**: leave yours out. To clip by the global norm, keep it, with `aggregate=False` ({doc}`recipes/clipping`).
"""),
    Message("FactorOfReplicasError", "summed twice", lambda g: g.run(summed_by_hand(mr.losses.compute_average_loss, 2), g.batch),
        text="""
* **Cause**: the step sums its gradients twice, with `ctx.all_reduce`, `jax.lax.psum`, or a variable that aggregates.
"""),
    Message("UnevenReplicasError", "reduce", lambda g: g.strategy.reduce("sum", g.odd),
        hide=r"\(2,\), \(1,\)\.", text="""
* **Cause**: R does not divide the last batch. `strategy.gather(value, axis=0)` joins the rows.
"""),
    Message("UnevenReplicasError", "all_reduce", lambda g: g.run(lambda x: ctx().all_reduce("sum", x), g.odd),
        hide=r"the replicas whose .*?\d\.(?= A )", text="""
* **Cause**: the step combines arrays of rows ({doc}`concepts/uneven-batches`).
"""),
    Message("UnevenReplicasError", "a mean over no rows", lambda g: g.run(
        summed_by_hand(lambda x: mr.losses.mean_over_own_rows(jnp.mean(x - ctx().all_gather(x, axis=0)))), one_row(g)),
        hide=r"the replicas whose .*?\d\.(?= A )", text="""
* **Cause**: there are fewer rows than replicas, and the loss sees the rows of all, by `all_gather` or batch statistics. The
  mean of no rows is NaN; the sum is 0.
* **Cure**: the message's line, or one loss per example from the function given to `mr.value_and_grad`.
"""),
    Message("UnevenReplicasError", "a loss of two terms", lambda g: g.run(
        lambda x: mr.losses.compute_average_loss(jnp.stack([x.mean(), (x**2).mean()])), g.odd),
        hide=r"\(2, [12]\)", text="""
* **Cause**: the loss is a mean over the wrong axis, or has several terms. Even batches cannot show it.
* **Cure**: one of the lines. Several losses for each example (2n, of two views) need none.
"""),
    Message("UnevenReplicasError", "a derivative from outside", lambda g: jax.grad(
        lambda w: g.run(with_its_own_derivative, g.odd, w))(1.0), text="""
* **Cause**: a function with `jax.custom_vjp` or `jax.custom_jvp` returns a value of rows and one without. Even batches have no
  such limit.
"""),
    Message("PerReplicaError", "use as one array", lambda g: g.batch + 1,
        hide=r"`\+`|\(2,\)", text="""
* **Cause**: the program calls a step without `strategy.run`, or uses a batch or a result of `strategy.run` as one array: `loss
  + 1`, `float(loss)`, `f"{loss:.3f}"`, `np.asarray(loss)`.
* **Cure**: `strategy.reduce("sum", loss)`, for [a loss that names its
  divisor](concepts/losses.md#the-loss-says-how-it-is-divided). If it is a `jnp.mean`, return
  `mr.losses.mean_over_own_rows(loss)`.
"""),
    Message("PerReplicaError", "vmap of run", lambda g: g.strategy.reduce("sum", jax.vmap(
        lambda k: g.run(lambda x, k: x * k, g.batch, k))(jnp.ones(2))), text="""
* **Cause**: `jax.vmap(run_step)(many)` returns what `strategy.run` returned, or maps over a batch. With one array for a result,
  all of JAX's transformations go around `run`, `reduce`, `gather` and `mr.function`; variables may be assigned under none of
  them.
"""),
    Message("OneProgramError", "branch", lambda g: g.run(lambda x: x if ctx().replica_id_in_sync_group == 0 else -x, g.batch),
        text="""
* **Cure**: to print or save on one worker, write `if strategy.is_chief:` outside the step.
"""),
    Message("OneProgramError", "float", lambda g: g.run(lambda x: float(x.sum()), g.batch), text="""
* **Cause**: one of these, or an `if` or a `while` over an array. To debug, run the step under `with mr.eager():`.
"""),
    Message("ContextError", "read under jit", lambda g: jax.jit(lambda: g.w * 2)()),
    Message("ContextError", "gather in a step", lambda g: g.run(lambda: g.strategy.gather(g.w.value, axis=0)), text="""
* **Cure**: a step uses the replica context's `all_reduce`, `all_gather` and `merge_call`.
"""),
    Message("ContextError", "create in a step", lambda g: g.run(lambda: mr.Variable(0.0, name="made")), text="""
* **Cause**: the step makes a `mr.Variable`, an optimizer or a layer.
"""),
    Message("ContextError", "next batch in a step", next_batch_in_a_step, text="""
* **Cause**: `next(iterator)`, or a loop over the dataset, is inside the function, as `tf.function` allows.
"""),
    Message("ContextError", "loss outside", lambda g: mr.losses.compute_average_loss(np.ones(3)), text="""
* **Cure**: outside a step, `jnp.mean(losses)` is the mean.
"""),
    Message("ContextError", "another mesh", in_a_mesh,
        hide=r"\{.*?\}"),
    Message("ContextError", "a map over devices", lambda g: g.run(lambda: jax.pmap(lambda x: x)(jnp.ones((1, 2)))), text="""
* **Cause**: a step, or a library in it, still divides its rows among devices, as without a strategy.
"""),
    Message("ContextError", "an NNX object", closes_over_a_model,
        hide=r"BatchStat(?=\))", text="""
* **Cause**: BatchNorm and Dropout change their statistics and counters at each call.

```text
NameError: Found an unbound axis name: replica. …
```

* **Cause**: `jax.lax.pmean(x, "replica")`, or another collective of JAX, outside of a step, where there are no replicas.
* **Cure**: `strategy.reduce("mean", value)`.
"""),
    Message("StrategyMismatchError", "batch", lambda g: mr.MirroredStrategy(["cpu:0"]).run(lambda x: x, args=(g.batch,)),
        hide=r"2(?= rep)|1(?=;)"),
    Message("StrategyMismatchError", "variable", lambda g: mr.MirroredStrategy(["cpu:0"]).run(lambda: g.w.value),
        hide=r"(?<=on )\d rep.*?\)(?=,|\.)|mr\.Mirr.*?\)\)", text="""
* **Cause**: two strategies with different devices meet.
* **Cure**: make the strategy once. After another list of devices in a notebook, run all cells again.
"""),
    Message("VariableLostError", "a program fails", a_program_fails,
        hide=r"(?<=failed \().*?\.(?=\)\.)", text="""
* **Cause**: a program that was overwriting variables in place failed: out of memory, or a NaN under `jax_debug_nans`. The error
  may come one call late: the next `run` or read names everything that is lost.
* **Cure**: one of the message's lines.
"""),
    Message("PlanError", "an unknown topology", lambda g: mr.topology("v5e:16"),
        hide=r"(?<=')v5e:16(?=';)|'v5e:16x16', .*?\.(?= A)", text="""
* **Cause**: no topology has this name ({doc}`plan` lists them), its compiler is not installed, or the program reads a value,
  which a plan does not compute.
* **Cure**: before a line that reads a value, write `print(mr.plan(strategy))`.
"""),
    Message("DeviceError", "twice", lambda g: mr.MirroredStrategy(["cpu:0", "cpu:0"]),
        hide=r"cpu:0(?= twice)|(?<=')cpu:0(?=' and|'\. )"),
    Message("DeviceError", "no gpu", no_gpu,
        hide=r"gpu:31|cpu:0, cpu.*?\.(?= L)", text="""
* **Cure**: name devices of `jax.devices()`, or leave the list out: without a GPU, `mr.MirroredStrategy()` uses the CPU, and
  logs that at INFO. With NVIDIA's driver, the message says why JAX has no GPU: it lacks CUDA ({doc}`gpu`), or `JAX_PLATFORMS`
  leaves GPUs out.
"""),
    Message("DeviceError", "does not start", broken_accelerator,
        hide=r"Unable.*?\.(?= N)", text="""
* **Cause**: another process may have the memory, or the driver does not fit. All workers end. `mr.MirroredStrategy(["cpu:0"])`
  trains on the CPU too.
"""),
    Message("DeviceError", "no such gpu", no_such_gpu,
        hide=r"(?<=is ')7", text="""
* **Cause**: the variable names a GPU that this machine has not. JAX alone would warn, and train on the CPU.
"""),
    Message("DeviceError", "no gpu of the launcher", lambda g: no_such_gpu(g, "MIRRORED_GPUS", "1"),
        hide=r"1 GPU(?= in)|0\.(?= N)|Run it.*?\.(?= To)"),
    Message("DeviceError", "too late", lambda g: mr.MirroredStrategy(["cpu:99"]),
        hide=r"cpu:99|. cpu dev.*?\.(?= CPU)|100(?= in)", text="""
* **Cure**: in a notebook, restart the kernel and make the strategy in the first cell.
"""),
    Message("ClusterConfigError", "no task", no_task, text="""
* **Cause**: the cluster's description is wrong, in the place that the message names: `TF_CONFIG`, Slurm, `cluster=`.
* **Cure**: `mirrored env` prints what a process finds; `mirrored check` tries it ({doc}`launch`). A restart does not help.
"""),
    Message("ClusterConfigError", "started by a worker", started_by_a_worker,
        hide=r"1(?=, which)|0 of 2.*?(?= already)"),
    Message("ClusterStartError", "jax has started", lambda g: mr.MultiWorkerMirroredStrategy(
        mr.SimpleClusterResolver({"worker": ["a:1", "b:1"]}, task_type="worker", task_id=0)), text="""
* **Cause**: a `jnp` call, often in an imported module, came first.
"""),
    Message("ClusterStartError", "no chief", lambda g: meet(two_workers(1), {}, 0.05),
        hide=r"worker 1|0 s(?= for)|127\.0\.0\.1:1|Connection refused\.|the arguments", text="""
* **Cure**: read worker 0's log, and try `mirrored check` on all hosts. `mirrored launch --max-restarts` tries again.
"""),
    Message("WorkerLostError", "does not come", lambda g: Coordination(FakeClient(), 0, 2).exchange(
        "end", 1, timeout_seconds=0.05),
        hide=r"(?<=')end|(?<=worker )0"),
    Message("WorkerLostError", "different barriers", different_barriers,
        hide=r"(?<=')end of \d", text="""
* **Cause**: another worker has died or hangs, or takes another way through the program, such as `if strategy.is_chief:
  strategy.barrier("end")`.
* **Cure**: read the named worker's log for its own error.
"""),
    Message("ProgramMismatchError", "more batches", lambda g: require_same_history([["2", "x"], ["1", "y"]], list),
        hide=r"worker 0: 2; worker 1: 1\.", text="""
* **Cause**: `if strategy.is_chief:` is around [a call that communicates](workers.md#calls-that-communicate), or the workers run
  different versions of the code.
* **Cure**: take steps on all workers. Let only the chief print and write files.
"""),
    Message("CheckpointError", "another shape", another_shape,
        hide=r"1(?= in)|w(?= is)", text="""
* **Cause**: the model, or its names, differ from those that were saved.
* **Cure**: build the same model, or restore the part that fits: `restore_latest(partial=True)` ({doc}`recipes/fine-tuning`).
  {doc}`checkpoints` describes damaged files, full disks and two programs in one directory.
"""),
    Message("TFRecordError", "cut short", cut_short,
        hide=r"0(?=, at|:)|4(?= bytes)", text="""
* **Cause**: the file is damaged, or is not compressed as `compression` says.
* **Cure**: write or copy it again.
"""),
    Message("FactorOfReplicasWarning", "nobody has said", lambda g: g.run(step_of(g, jnp.mean), g.batch), text="""
* **Cause**: the loss is a scalar of yours, or a gradient was computed by hand ({doc}`concepts/losses`). Or a `custom_vjp` packs
  values and derivatives in one vector, as `jax.experimental.ode.odeint` does: with a loss for each example `aggregate="sum"` is
  right.
* **Cure**: one of the lines ({doc}`recipes/check-loss-scaling` measures which).
"""),
    Message("FactorOfReplicasWarning", "nobody has said, of a sum by hand", lambda g: g.run(summed_by_hand(jnp.mean), g.batch),
        text="""
* **Cause**: as above, but the step itself sums gradients: with `ctx.all_reduce`, `jax.lax.psum`, or a variable with
  `aggregation="sum"`.
* **Cure**: the first two lines belong in the function that `jax.grad`, `nnx.value_and_grad` or `eqx.filter_value_and_grad`
  differentiates.
"""),
    Message("FactorOfReplicasWarning", "a root of a share", lambda g: g.run(
        summed_by_hand(lambda x: jnp.sqrt(mr.losses.compute_average_loss(x))), g.batch), text="""
* **Cause**: the loss is no sum of shares, but the root of one (RMSE), a logarithm, or `jnp.where(jnp.isfinite(share), share,
  0)`.
* **Cure**: the first line adds up the shares, computes the function of the whole, and counts it once.
"""),
    Message("FactorOfReplicasWarning", "whole batch", lambda g: g.run(step_of(g, jnp.mean), np.ones(4, np.float32)),
        hide=r"(?<=all )2|2(?= times)"),
    Message("FactorOfReplicasWarning", "weight decay", lambda g: g.run(
        lambda w, x: ctx().all_reduce("sum", 0.1 * w + jax.grad(lambda w: jnp.mean(x * w))(w)), 1.0, g.batch)),
    Message("FactorOfReplicasWarning", "mean of shares", lambda g: g.run(
        lambda x: ctx().all_reduce("mean", mr.losses.compute_average_loss(x)), g.batch), text="""
* **Cause**: `ctx.all_reduce("mean", ...)`, or a variable with `aggregation="mean"`. A mean belongs to a loss that is a mean
  over this replica's own rows.
"""),
    Message("ReplicasDivergeWarning", "a state that differs", a_state_that_differs,
        hide=r"a_state\S+|1(?= of)|result\[0\]\['w'\]", text="""
* **Cause**: a step updates parameters and a state of optax with this replica's gradients.
* **Cure**: the message's line before the update, or a state in a `mr.Variable`, which is proven equal.
"""),
    Message("SameNoiseWarning", "dropout", lambda g: g.run(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), g.odd),
        text="""
* **Cause**: a key in the step's arguments or closure is the same everywhere, so dropout drops the same elements of each
  replica's first row.
* **Cure**: begin the step with the message's line ({doc}`recipes/random`).
"""),
    Message("UnevenReplicasWarning", "outside", lambda g: g.strategy.reduce("mean", g.run(jnp.mean, g.odd)), text="""
* **Cause**: R does not divide the batch.
* **Cure**: one of the lines. A sync-on-read variable with `aggregation="mean"` raises `UnevenReplicasError`.
"""),
    Message("RecompilationWarning", "new shapes", lambda g: [
        g.run(step, np.ones(rows, np.float32)) for step in [lambda x: x.shape[0]] for rows in range(1, 30)],
        hide=r"<lambda>\S+|9(?= times)|(?<=shape )\(.*?32|(?<=to )\(.*?32", text="""
* **Cause**: arguments have new shapes, dtypes, strings, flags or functions, or the step's code names a new value, such as
  `self.lr` ({doc}`concepts/compilation`).
* **Cure**: pass numbers that change as arguments, and define the step outside the loop.
"""),
    Message("RecompilationWarning", "new lengths", lambda g: [
        g.run(step, np.ones((2, length), np.float32)) for step in [lambda x: x.shape[1]] for length in range(1, 30)],
        hide=r"<lambda>\S+|9(?= times)|(?<=shape )\(.*?32|(?<=to )\(.*?32", text="""
* **Cause**: each batch is padded to its own longest row.
* **Cure**: [buckets of lengths](recipes/padding.md#buckets-of-lengths).
"""),
    Message("RecompilationWarning", "new transformations", lambda g: [
        g.run(step, State(optax.sgd(0.1))) for step in [lambda state: None] for _ in range(10)],
        hide=r"<lambda>\S+|9(?= times)|(?<=shape )\(.*?32|(?<=to )\(.*?32", text="""
* **Cause**: a search makes `optax.adam(rate)` for each model, in a train state or an `nnx.Optimizer`.
* **Cure**: share one `tx`. With `inject_hyperparams`, set `state.opt_state.hyperparams["learning_rate"]` for each rate.
"""),
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


def page(texts: list[str]) -> str:
    """Return the page, of the text of each message."""
    parts, section = [HEAD], ""
    for message, text in zip(MESSAGES, texts, strict=True):
        if message.error != section:
            parts.append(f"## {message.error}\n")
        section = message.error
        parts += [f"```text\n{text}\n```\n", message.text.removeprefix("\n")]
    return "\n".join(part for part in parts if part)


def main() -> None:
    texts = []
    for message in MESSAGES:
        with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
            texts.append(raised(message, monkeypatch, Path(folder)))
    PAGE.write_text(page(texts))


if __name__ == "__main__":
    main()
