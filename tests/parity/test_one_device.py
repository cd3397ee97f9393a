"""One training program, the same numbers on one device in plain JAX and on 3 replicas; on 8 when there is time."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr

GLOBAL_BATCH = 48  # 3 and 8 divide it, twice
STEPS = 2


def linear_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, GLOBAL_BATCH, 4)).astype(np.float32)
    return {"x": x, "y": (x @ np.float32([1, -2, 3, 0.5]) + 0.1).astype(np.float32), "weight": weights()}


def image_data():
    rng = np.random.default_rng(1)
    images = rng.normal(size=(STEPS, GLOBAL_BATCH, 8, 8, 1)).astype(np.float32)
    return {"x": images, "y": rng.integers(0, 3, (STEPS, GLOBAL_BATCH)).astype(np.int32), "weight": weights()}


def weights():
    return np.random.default_rng(2).uniform(0, 2, (STEPS, GLOBAL_BATCH)).astype(np.float32)


# -- models: parameters and one loss per example, in plain JAX


def linear_params():
    return {"w": np.zeros(4, np.float32), "b": np.float32(0)}


def linear_losses(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def mlp_params():
    rng = np.random.default_rng(3)
    shapes = [(4, 8), (8, 1)]
    return [{"w": rng.normal(0, 0.5, shape).astype(np.float32), "b": np.zeros(shape[1], np.float32)} for shape in shapes]


def mlp_losses(params, batch):
    x = batch["x"]
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (jnp.squeeze(x @ params[-1]["w"] + params[-1]["b"], -1) - batch["y"]) ** 2


def conv_params():
    rng = np.random.default_rng(4)
    return {
        "kernel": rng.normal(0, 0.3, (3, 3, 1, 4)).astype(np.float32),
        "dense": rng.normal(0, 0.3, (4 * 4 * 4, 3)).astype(np.float32),
        "bias": np.zeros(3, np.float32),
    }


def conv_losses(params, batch):
    x = jax.lax.conv_general_dilated(
        batch["x"], jnp.asarray(params["kernel"]), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    logits = jax.nn.relu(x).reshape(x.shape[0], -1) @ params["dense"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def l2(params):
    return 0.01 * sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))


# -- the same program twice

ADAM_CLIPPED = lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))  # noqa: E731
MOMENTUM = lambda: optax.sgd(0.05, momentum=0.9)  # noqa: E731
PROGRAMS = {
    "linear model, SGD": (linear_data, linear_params, linear_losses, lambda: optax.sgd(0.1), {}),
    "linear model, sample weights": (linear_data, linear_params, linear_losses, lambda: optax.sgd(0.1), {"is_weighted": True}),
    "MLP, Adam and clipping": (linear_data, mlp_params, mlp_losses, ADAM_CLIPPED, {}),
    "MLP, regularization": (linear_data, mlp_params, mlp_losses, MOMENTUM, {"regularization": l2}),
    "MLP, gradient accumulation": (linear_data, mlp_params, mlp_losses, lambda: optax.MultiSteps(optax.adam(0.05), 2), {}),
    "MLP, two micro-batches": (linear_data, mlp_params, mlp_losses, ADAM_CLIPPED, {"micro_batches": 2}),
    "convolution, momentum": (image_data, conv_params, conv_losses, MOMENTUM, {"is_weighted": True}),
}


@functools.cache
def trained_plainly(name):
    """Train on the whole batch, on one device, with JAX and optax alone."""
    data, params_of, losses_of, make_tx, options = PROGRAMS[name]
    tx = make_tx()
    regularization = options.get("regularization", lambda params: 0.0)

    def loss_of(params, batch):
        losses = losses_of(params, batch)
        return jnp.mean(losses * batch["weight"] if options.get("is_weighted") else losses) + regularization(params)

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(jnp.asarray, params_of())
    state, losses = tx.init(params), []
    for i in range(STEPS):
        params, state, loss = step(params, state, jax.tree.map(lambda x, i=i: x[i], data()))
        losses.append(float(loss))
    return params, losses


def make_step(name, strategy):
    """The same under a strategy: variables, and a step on one replica's part of the batch."""
    _, params_of, losses_of, make_tx, options = PROGRAMS[name]
    with strategy.scope():
        variables = jax.tree.map(mr.Variable, params_of())
        optimizer = mr.Optimizer(make_tx(), variables)

    def loss_of(batch, global_batch):
        weight = batch["weight"] if options.get("is_weighted") else None
        loss = mr.losses.compute_average_loss(losses_of(variables, batch), weight, global_batch)
        if "regularization" in options:
            loss += mr.losses.scale_regularization_loss(options["regularization"](variables))
        return loss

    def step(batch):
        count = options.get("micro_batches", 1)
        if count == 1:
            loss, gradients = mr.value_and_grad(loss_of, variables)(batch, None)
        else:
            parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

            def add(total, part):
                return jax.tree.map(jnp.add, total, mr.value_and_grad(loss_of, variables)(part, GLOBAL_BATCH)), None

            zeros = (0.0, jax.tree.map(jnp.zeros_like, jax.tree.map(lambda value: value, variables)))
            (loss, gradients), _ = mr.scan(add, zeros, parts)
        optimizer.apply_gradients(gradients)
        return mr.get_replica_context().all_reduce("sum", loss)

    return variables, step


def assert_same(name, variables, losses):
    params, plain_losses = trained_plainly(name)
    np.testing.assert_allclose(losses, plain_losses, rtol=2e-4)
    for (path, own), value in zip(
        jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda v: v, variables)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(own, value, rtol=2e-3, atol=2e-5, err_msg=jax.tree_util.keystr(path))


def check(name, strategy):
    variables, step = make_step(name, strategy)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), PROGRAMS[name][0]())
    dataset = strategy.distribute_dataset(strategy.make_numpy_dataset(rows).batch(GLOBAL_BATCH))
    losses = [float(strategy.run(step, args=(batch,))) for batch in dataset]
    assert_same(name, variables, losses)
    strategy.assert_mirrored()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_numbers_of_three_replicas_are_those_of_one_device(strategy3, name):
    check(name, strategy3)


@pytest.mark.slow
def test_the_numbers_of_eight_replicas_are_those_of_one_device():
    for name in PROGRAMS:
        check(name, mr.MirroredStrategy([f"cpu:{i}" for i in range(8)]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["together", "one_by_one"])
def test_the_numbers_of_eight_replicas_on_one_or_two_devices_are_those_of_one_device(schedule):
    """Each program once on one device and once on two."""
    for name, num_devices in zip(PROGRAMS, itertools.cycle((1, 2) if schedule == "together" else (2, 1))):
        check(name, mr.MirroredStrategy([f"cpu:{i}" for i in range(num_devices)], num_replicas=8, schedule=schedule))


@pytest.mark.parametrize("schedule", ["together", "one_by_one"])
def test_the_numbers_of_three_replicas_on_one_device_are_those_of_one_device(schedule):
    check("convolution, momentum", mr.MirroredStrategy(["cpu:0"], num_replicas=3, schedule=schedule))


def test_all_steps_in_one_program_give_the_same_numbers(strategy3):
    name, size = "MLP, gradient accumulation", GLOBAL_BATCH // 3
    variables, step = make_step(name, strategy3)
    data = PROGRAMS[name][0]()
    batches = strategy3.distribute_values_from_function(
        lambda ctx: jax.tree.map(lambda x: x[:, ctx.replica_id_in_sync_group * size :][:, :size], data)
    )
    _, losses = mr.scan(lambda _, batch: (None, strategy3.run(step, args=(batch,))), None, batches)
    assert_same(name, variables, losses)
    strategy3.assert_mirrored()
