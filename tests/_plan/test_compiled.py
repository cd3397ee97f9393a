"""Training steps compiled for a TPU slice that is not here: as by hand, in every kind of program, up to where values are read.

They need libtpu: `.ci/run` installs it beside the environment, because JAX looks for a TPU wherever it finds libtpu.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from parameters import nightly
from strategies import variable

import mirrored as mr
from mirrored._plan.modules import collectives_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install libtpu"),
]
ROWS, WIDTH, CLASSES = 4, 256, 10


@functools.cache
def devices() -> tuple[jax.Device, ...]:
    return tuple(mr.topology("v5e:2x4"))


def train(num_batches=2, extra_rows=0, shard_state=False, **how):
    """Plan two training steps of an MLP; return its strategy, and what the last step returned."""
    strategy = mr.MirroredStrategy(devices(), **how)
    with strategy.scope():
        w = mr.Variable(np.zeros((WIDTH, WIDTH), np.float32), name="w")
        u = mr.Variable(jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32), name="u")
        optimizer = mr.Optimizer(optax.adam(1e-3), [w, u], shard_state=shard_state)

    def step(x, y):
        losses = lambda: optax.softmax_cross_entropy_with_integer_labels(jax.nn.relu(x @ w) @ u, y)  # noqa: E731
        loss, gradients = mr.value_and_grad(losses, [w, u])()
        optimizer.apply_gradients(gradients)
        return loss

    size = ROWS * strategy.num_replicas_in_sync
    num_rows = num_batches * size + extra_rows
    data = np.zeros((num_rows, WIDTH), np.float32), np.zeros(num_rows, np.int32)
    total = None
    for x, y in strategy.distribute_dataset(strategy.make_numpy_dataset(data).batch(size)):
        total = strategy.reduce("sum", strategy.run(step, args=(x, y)))
    return strategy, total, step


def by_hand():
    """Compile the same step for the same devices, without the library."""
    mesh, tx = jax.sharding.Mesh(np.array(devices()), ("r",)), optax.adam(1e-3)
    params = {name: jax.ShapeDtypeStruct((WIDTH, n), jnp.float32) for name, n in (("w", WIDTH), ("u", CLASSES))}

    def step(state, x, y):
        params, opt, count = state

        def loss_of(params):
            logits = jax.nn.relu(x @ params["w"]) @ params["u"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum() / (ROWS * 8)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        total, gradients = jax.lax.psum((loss, gradients), "r")
        updates, opt = tx.update(gradients, opt, params)
        return (optax.apply_updates(params, updates), opt, count + 1), loss[None], total

    everywhere, split = PartitionSpec(), PartitionSpec("r")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(everywhere, split, split), out_specs=(everywhere, split, everywhere), check_vma=False
    )
    place = lambda tree, spec: jax.tree.map(  # noqa: E731
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)), tree
    )
    state = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((), jnp.int32)
    x, y = jax.ShapeDtypeStruct((ROWS * 8, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS * 8,), jnp.int32)
    return jax.jit(mapped, donate_argnums=0).lower(place(state, everywhere), place(x, split), place(y, split)).compile()


def test_a_training_step_sends_and_needs_what_it_does_by_hand() -> None:
    strategy, total, _ = train()
    [program] = mr.plan(strategy).programs
    hand = by_hand()
    sent, sent_by_hand = program.collectives, collectives_in(hand.as_text())
    assert len(sent) == len(sent_by_hand) == 1
    assert sent[0].num_bytes <= 1.01 * sent_by_hand[0].num_bytes + 1024
    sizes = hand.memory_analysis()
    peak = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    assert program.memory.peak <= 1.05 * peak + 2**16
    assert program.memory.variables == 4 * WIDTH * (WIDTH + CLASSES) and program.memory.state == 2 * program.memory.variables + 8
    assert program.flops >= 3 * 2 * ROWS * WIDTH * WIDTH
    assert (total.shape, total.dtype) == ((), jnp.float32)


def test_uneven_batches_have_a_program_of_their_own() -> None:
    strategy, *_ = train(extra_rows=3)
    even, uneven = mr.plan(strategy).programs
    assert uneven.arguments == ("float32[8,1,256]", "int32[8,1]") and even.arguments == ("float32[8,4,256]", "int32[8,4]")
    assert sum(sent.num_bytes for sent in uneven.collectives) <= sum(sent.num_bytes for sent in even.collectives) + 1024


def test_a_shared_out_update_keeps_an_eighth_of_the_state() -> None:
    whole, shared = (mr.plan(train(shard_state=shared)[0]).programs[0] for shared in (False, True))
    assert shared.memory.state < whole.memory.state / 6 and shared.memory.variables == whole.memory.variables
    assert max(sent.num_bytes for sent in shared.collectives if sent.kind == "reduce-scatter") >= 4 * WIDTH * WIDTH


MANY = [("v5e:4x4", "parts"), ("v5e:8x8", "whole"), *nightly(*((t, "whole") for t in ("v5e:16x16", "v5p:4x4x4", "v6e:8x8")))]


@pytest.mark.parametrize(("name", "storage"), MANY)
def test_gradients_are_scattered_among_many_chips_too(name, storage) -> None:
    strategy = mr.MirroredStrategy(mr.topology(name), storage=storage)
    w = variable(jax.ShapeDtypeStruct((1024, 1024), jnp.float32), strategy, name="w")
    optimizer = mr.Optimizer(optax.adam(1e-3), [w], shard_state=True)

    def step(x):
        optimizer.apply_gradients(mr.grad(lambda: jnp.square(x @ w).mean(-1), [w])())

    [x] = strategy.distribute_dataset([np.zeros((strategy.num_replicas_in_sync, 1024), np.float32)])
    strategy.run(step, args=(x,))
    [program] = mr.plan(strategy).programs
    scattered = [sent.num_bytes for sent in program.collectives if sent.kind == "reduce-scatter"]
    assert scattered[0] == 4 * 1024 * 1024 and sum(scattered[1:]) <= scattered[0] / 4  # XLA may write a gather as an all-reduce


def test_a_scatter_that_xla_writes_as_a_fused_all_reduce_counts_what_is_sent() -> None:
    """XLA does so where the parts of the devices do not fill its tiles."""
    mesh = jax.sharding.Mesh(np.array(devices()), ("r",))
    scatter = lambda x: jax.lax.psum_scatter(2 * x, "r", tiled=True)  # noqa: E731
    mapped = jax.shard_map(scatter, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("r"), check_vma=False)
    rows = jax.ShapeDtypeStruct((8 * 393, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    text = jax.jit(mapped).lower(rows).compile().as_text()
    [sent, *_] = collectives_in(text)
    assert sent.kind == "reduce-scatter" and "%all-reduce-scatter" in text
    assert rows.size * 4 <= sent.num_bytes <= 1.05 * rows.size * 4


@pytest.mark.parametrize("schedule", ["together", *nightly("one_by_one")])
def test_several_replicas_on_a_device(schedule) -> None:
    strategy, *_ = train(num_replicas=16, schedule=schedule)
    [program] = mr.plan(strategy).programs
    assert program.arguments[0] == "float32[16,4,256]" and f"2 on each device, {schedule.replace('_', ' ')}" in str(strategy)
    assert len(program.collectives) == 1


def test_functions_and_loops() -> None:
    strategy = mr.MirroredStrategy(devices())
    w = variable(np.zeros((WIDTH, CLASSES), np.float32), strategy)
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])

    def step(x):
        loss, gradients = mr.value_and_grad(lambda: jnp.square(x @ w).mean(-1), [w])()
        optimizer.apply_gradients(gradients)
        return loss

    @mr.function
    def two_steps(x):
        return mr.fori_loop(0, 2, lambda i, total: total + strategy.reduce("sum", strategy.run(step, args=(x,))), jnp.float32(0))

    @mr.function
    def each_step(batches):
        return mr.scan(lambda total, x: (total + strategy.reduce("sum", strategy.run(step, args=(x,))), total), 0.0, batches)

    [x] = strategy.distribute_dataset([np.zeros((16, WIDTH), np.float32)])
    assert two_steps(x).shape == ()
    total, history = each_step(strategy.run(lambda x: jnp.stack([x] * 5), args=(x,)))
    assert (total.shape, history.shape) == ((), (5,))
    found = {program.name.rpartition(".")[2]: program for program in mr.plan(strategy).programs}
    gradients = lambda name: [sent.times for sent in found[name].collectives if sent.num_bytes > 4]  # noqa: E731
    assert (gradients("two_steps"), gradients("each_step")) == ([2], [5])
    assert found["each_step"].bytes_moved > 1.5 * found["two_steps"].bytes_moved


def test_models_of_nnx_linen_and_equinox() -> None:
    nnx, linen, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen"), pytest.importorskip("equinox")
    strategy = mr.MirroredStrategy(devices())
    [(x, y)] = strategy.distribute_dataset([(np.zeros((16, 8), np.float32), np.zeros(16, np.int32))])
    losses_of = optax.softmax_cross_entropy_with_integer_labels
    net = linen.Dense(CLASSES)
    with strategy.scope():
        model = nnx.Linear(8, CLASSES, rngs=nnx.Rngs(0))
        own = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        params = mr.Variable(net.init(jax.random.key(0), np.zeros((1, 8), np.float32)))
        module = mr.Variable(eqx.nn.MLP(8, CLASSES, 16, 1, key=jax.random.key(0)))
        others = [mr.Optimizer(optax.adam(1e-3), tree) for tree in (params, module)]

    def of_nnx(model, own, x, y):
        loss_of = lambda model: mr.losses.compute_average_loss(losses_of(model(x), y))  # noqa: E731
        loss, gradients = nnx.value_and_grad(loss_of)(model)
        own.update(model, mr.get_replica_context().all_reduce("sum", gradients))
        return loss

    def of_trees(x, y):
        for tree, optimizer, logits in (
            (params, others[0], lambda: net.apply(params.value, x)), (module, others[1], lambda: jax.vmap(module.value)(x)),
        ):  # fmt: skip
            _, gradients = mr.value_and_grad(lambda logits=logits: losses_of(logits(), y), tree)()
            optimizer.apply_gradients(gradients)

    for _ in range(2):
        strategy.run(of_nnx, args=(model, own, x, y))
        strategy.run(of_trees, args=(x, y))
    assert len(mr.plan(strategy).programs) == 2


def test_values_are_refused_and_all_else_works_outside_of_steps(tmp_path) -> None:
    strategy, total, _ = train()
    w = variable(np.zeros(3, np.float32), strategy, name="w")
    count = variable(0.0, strategy, synchronization="on_read", aggregation="sum")
    w.assign(np.ones(3, np.float32)).assign_add(np.ones(3, np.float32))
    count.assign_add(1.0)
    assert "planned" in repr(w) and "planned: 8 x TPU v5 lite" in strategy.explain()
    strategy.barrier("end")
    assert (w + 1).shape == (3,)  # what is computed of shapes is a shape
    for reading in (w.numpy, lambda: float(total + 1), lambda: strategy.local_results(w), lambda: float(count.value)):
        with pytest.raises(mr.PlanError, match="the plan ends here"):
            reading()
    page = mr.report(strategy, tmp_path / "plan.html").read_text()
    assert "<h2>Plan</h2><pre>fits; plan for 8 replicas" in page and "trained variables" in page
    assert json.loads(json.dumps(mr.plan(strategy).as_dict()))["devices"] == 8


def test_many_steps_with_random_keys_and_numbers() -> None:
    """So many that on devices the copies would have been compared meanwhile."""
    strategy = mr.MirroredStrategy(devices()[:3])
    w, key = variable(np.zeros(8, np.float32), strategy), variable(jax.random.key(0), strategy)

    def step(x, scale):
        new, own = jax.random.split(key.value)
        key.assign(new)
        w.assign_add(mr.get_replica_context().all_reduce("sum", x.sum(0)) * scale + jax.random.normal(own, (8,)))

    [x] = strategy.distribute_dataset([np.zeros((6, 8), np.float32)])
    for scale in range(300):
        strategy.run(step, args=(x, float(scale)))
    strategy.run(step, args=(x, np.float32(1)))
    w.assign(w.value)
    with pytest.raises(mr.PlanError, match=r"values of an array key<fry>\[\]"):
        np.asarray(key.value)
    assert len(mr.plan(strategy).programs) == 2


def test_a_batch_of_fewer_rows_than_replicas_and_a_strategy_without_programs() -> None:
    strategy, _, step = train(num_batches=1)
    [(x, y)] = strategy.distribute_dataset([(np.zeros((3, WIDTH), np.float32), np.zeros(3, np.int32))])
    strategy.run(step, args=(x, y))
    assert len(mr.plan(strategy).programs) == 2
    with pytest.raises(mr.PlanError, match=r"no step was called.*strategy\.run"):
        mr.plan(mr.MirroredStrategy(devices()))


def test_a_topology_that_is_none_is_refused_by_its_compiler() -> None:
    with pytest.raises(mr.PlanError, match=r"the compiler refuses the topology 'v5e:3x7'"):
        mr.topology("v5e:3x7")


SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import mirrored as mr

def main():
    strategy = mr.{strategy}()
    with strategy.scope():
        w = mr.Variable(jax.ShapeDtypeStruct(({size}, 1024), jnp.float32), name="w")
        optimizer = mr.Optimizer(optax.adam(0.1), [w])

    def step(x):
        loss, gradients = mr.value_and_grad(lambda: ((x @ w) ** 2).mean(-1), [w])()
        optimizer.apply_gradients(gradients)
        return loss

    for x in strategy.distribute_dataset([np.zeros(({rows}, {size}), np.float32)] * 2):
        loss = strategy.reduce("sum", strategy.run(step, args=(x,)))
    print(float(loss))

main()
"""


def plan_script(tmp_path, *options, **words):
    """Run `mirrored plan` on the script, which is named last unless the options name another."""
    (tmp_path / "train.py").write_text(SCRIPT.format(**({"strategy": "MirroredStrategy", "size": 1024, "rows": 64} | words)))
    script = [] if options[-1].endswith(".py") else ["train.py"]
    path = os.pathsep.join(filter(None, sys.path))  # has libtpu
    command = [sys.executable, "-m", "mirrored", "plan", *options, *script]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("name", ["MirroredStrategy", *nightly("MultiWorkerMirroredStrategy")])
def test_the_command_plans_a_script_as_it_is(name, tmp_path) -> None:
    done = plan_script(tmp_path, "--topology", "v5e:8x8", strategy=name)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.startswith("fits; plan for 64 replicas")
        and "4.0 MiB in 1 all-reduce" in done.stdout
        and "efficiency" in done.stdout
    )
    assert "mirrored plan: compiling main.<locals>.step" in done.stderr and "train.py:19: the plan ends here" in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.nightly("tests/_plan/test_trials.py::test_each_remedy_is_tried_and_its_line_says_what_to_write_and_what_it_needs")
def test_the_command_says_what_does_not_fit_and_what_would(tmp_path) -> None:
    done = plan_script(tmp_path, "--topology", "v5e:2x4", "--rows", "65536", size=100_000)
    assert done.returncode == 1 and "does not fit into the memory of a device: it needs" in done.stdout, done.stderr
    remedies = done.stdout.partition("trying what fits:\n")[2].splitlines()
    assert [line.split()[1] + line.rpartition(":")[2] for line in remedies] == [
        "mr.Optimizer(..., does not fit",
        'mr.MirroredStrategy(storage="parts") does not fit',
        "mr.MirroredStrategy(num_replicas=64, does not fit",
        "32768 fits",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--topology", "v5e:8z8"], "does not know 'v5e:8z8'"), (["--topology", "v5e:2x4", "no.py"], "no file 'no.py'")],
)
def test_the_command_refuses_what_is_not_there(options, message, tmp_path) -> None:
    done = plan_script(tmp_path, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np
import mirrored as mr
strategy = mr.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(np.zeros((64, 3)), np.zeros((64, 1)), batch_size=32, verbose=0)
"""


def test_the_command_says_that_keras_runs_fit_itself(tmp_path) -> None:
    pytest.importorskip("keras")
    (tmp_path / "fit.py").write_text(KERAS)
    done = plan_script(tmp_path, "--topology", "v5e:2x4", "fit.py")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "fit, evaluate and predict cannot be planned, because Keras compiles and runs their programs itself." in done.stderr
    assert "It ended before strategy.run" in done.stderr


def test_the_command_ends_after_so_many_steps(tmp_path) -> None:
    text = SCRIPT.format(strategy="MirroredStrategy", size=64, rows=64).replace("* 2", "* 20")
    (tmp_path / "long.py").write_text(text)
    done = plan_script(tmp_path, "--topology", "v5e:2x4", "--steps", "7", "long.py")
    assert done.returncode == 0 and "step was called 7 times." in done.stderr and "plan for 8 replicas" in done.stdout


def test_a_script_that_names_its_devices_is_not_planned_and_says_so(tmp_path) -> None:
    (tmp_path / "named.py").write_text("import mirrored as mr\nprint(mr.MirroredStrategy(['cpu:0']).run(lambda: 7))\n")
    done = plan_script(tmp_path, "--topology", "v5e:2x4", "named.py")
    assert done.returncode == 1 and done.stdout == "7\n", done.stderr
    assert "compiled nothing for these devices" in done.stderr and "Traceback" not in done.stderr
