"""A mistake in a step is one clear error: what was done, where, and the line to write; the user's line comes last."""

import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import strategy_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

ROWS = np.ones((4, 3), np.float32)
NEEDED = (mr.OneProgramError, r"Python needed the value of an array, at {here}\. Write\n    ")
#: What is written in a step, and the error: its class, what it says was done, and the line to write.
MISTAKES = {
    "if": (lambda w, x: 1 if jnp.sum(x) > 1 else 2, *NEEDED, r"jnp\.where\(condition, a, b\), or mr\.cond\(.*no values yet"),
    "and": (lambda w, x: x[0, 0] > 0 and x[0, 1] > 0, *NEEDED, "join conditions with &"),
    "np.asarray": (lambda w, x: np.asarray(x), *NEEDED, r"jnp\.mean for np\.mean.* np\.asarray\(result\) outside"),
    "np.mean": (lambda w, x: np.mean(np.array([x[0, 0]])), *NEEDED, r"jnp\.mean for np\.mean"),
    "variable.numpy": (lambda w, x: w.numpy(), *NEEDED, r"np\.asarray\(result\) outside .* variable\.numpy\(\)"),
    "float": (lambda w, x: float(x[0, 0]), *NEEDED, r"float\(result\) outside of the step, which returns the array"),
    "item": (lambda w, x: x[0, 0].item(), *NEEDED, r"float\(result\) outside .*x\.item\(\)"),
    "range": (lambda w, x: list(range(x[0, 0].astype(int))), *NEEDED, r"mr\.fori_loop\(0, n, body, init\)"),
    "index": (lambda w, x: ["a", "b"][x[0, 0].astype(int)], *NEEDED, r"jnp\.asarray\(items\)\[i\]"),
    "mask": (lambda w, x: x[x > 0], *NEEDED, r"jnp\.where\(mask, x, 0\)"),
    "nonzero": (
        lambda w, x: jnp.nonzero(x), mr.OneProgramError, "of an array, at {here}. The size argument of jnp.nonzero must be",
        r"Write\n    jnp\.nonzero\(mask, size=n\)",
    ),
    "bincount": (
        lambda w, x: jnp.bincount(x[0].astype(int)), mr.OneProgramError, "at {here}. .*pass a static `length` argument",
        "jnp.bincount takes length=n",
    ),
    "repeat": (
        lambda w, x: jnp.repeat(x[0], x[0].astype(int)), mr.OneProgramError, "at {here}. .*to `total_repeat_length`",
        "jnp.repeat total_repeat_length=n",
    ),
    "in a loss": (lambda w, x: mr.grad(lambda: 1.0 if w > 0 else 2.0, w)(), *NEEDED, r"jnp\.where"),
    "in a loop": (lambda w, x: mr.fori_loop(0, 2, lambda i, c: c if i > 0 else -c, 1.0), *NEEDED, r"jnp\.where"),
    "format": (lambda w, x: f"{x[0, 0]:.3f}", mr.OneProgramError, "write an array in a format, at {here}", r"jax\.debug\.print"),
    "numpy": (lambda w, x: x.numpy(), AttributeError, "no attribute 'numpy', at {here}", r"np\.asarray\(result\)"),
    "its own division": (lambda w, x: x * (5 % (x.shape[0] // 9)), ZeroDivisionError, "by zero", ""),
    "backward": (lambda w, x: x.backward(), AttributeError, "'backward', at {here}", r"mr\.value_and_grad\(loss_fn, .*\)\(\)"),
    "cuda": (lambda w, x: x.cuda(), AttributeError, "no attribute 'cuda', at {here}", "Leave it out"),
    "waits": (
        lambda w, x: x.block_until_ready(), AttributeError, "'block_until_ready', at {here}",
        r"jax\.block_until_ready\(result\) outside of the step",
    ),
    "sharding": (lambda w, x: x.sharding, AttributeError, "'sharding', at {here}", r"jax\.typeof\(x\)"),
    "device": (lambda w, x: x.device, AttributeError, "'device', at {here}", "Leave it out"),
    "shapes": (lambda w, x: jnp.matmul(x, jnp.ones((4, 2))), TypeError, "same shape", ""),
    "name": (lambda w, x: missing + x, NameError, "name 'missing' is not defined", ""),  # noqa: F821
    "torch": (lambda w, x: as_torch(x), TypeError, "torch was given an array of JAX, at {here}", r"with jax\.numpy"),
    "poisson": (
        lambda w, x: jax.random.poisson(mr.get_replica_context().rng(0), 2.0, (3,)), TypeError, "poisson, was given .* at {here}",
        r"ctx\.rng\(key, by_rows=False\)",
    ),
    "unpacked": (
        lambda w, x: loss_and_gradients(w), TypeError, "a function was unpacked, at {here}",
        r"loss, gradients = mr\.value_and_grad\(loss_fn, variables\)\(\)",
    ),
    "returned gradients": (
        lambda w, x: {"g": mr.grad(lambda: w * 2.0, [w])}, TypeError, "the step returned <function",
        r"It is a function: call it, as in mr\.grad\(loss_fn, variables\)\(\)",
    ),
    "reduced gradients": (
        lambda w, x: mr.get_replica_context().all_reduce("sum", mr.grad(lambda: w * 2.0, [w])), TypeError,
        "all_reduce got <function", r"It is a function: call it, as in mr\.grad\(loss_fn, variables\)\(\)",
    ),
    "-=": (lambda w, x: in_place(w), UnboundLocalError, "local variable 'w'.*, at {here}", r"w\.assign_sub\(x\)"),
    "value()": (lambda w, x: w.value(), TypeError, "called like a function, at {here}", r"variable\.read_value\(\)"),
    "pmean": (lambda w, x: jax.lax.pmean(x, "batch"), NameError, "no axis 'batch', at {here}", r"pmean\(x, 'replica'\)"),
    "lax": (lambda w, x: jax.lax.exp(w), TypeError, r"jax\.lax, .* given a variable, at {here}", r"exp\(variable\.value\)"),
    "index of an array": (
        lambda w, x: x[:, w], TypeError, r"index of an array, was given a variable, at {here}", r"x\[:, variable\.value\]",
    ),
    "index in at": (lambda w, x: x.at[w].set(0.0), TypeError, r"index of an array, .* at {here}", r"x\[:, variable\.value\]"),
    "lax of two": (lambda w, x: jax.lax.mul(x[0, 0], w), TypeError, r"given a variable, at {here}", r"variable\.value"),
    "apply_updates": (
        lambda w, x: optax.apply_updates({"w": w}, {"w": x[0, 0]}), TypeError, r"optax\.apply_updates, .* at {here}",
        r"mr\.Optimizer\(tx, variables\) .* jax\.tree\.map\(jnp\.asarray, variables\), .* variable\.assign\(new\)",
    ),
}  # fmt: skip


def as_torch(x):
    raise TypeError(f"linear(): argument 'input' (position 1) must be Tensor, not {type(x).__name__}")


def loss_and_gradients(w):
    _, _ = mr.value_and_grad(lambda: w * 2.0, [w])  # `()` is missing


def in_place(w):
    def update():
        w -= 1.0  # noqa: F823, F841 - the mistake

    update()


def test_a_mistake_in_a_step_is_one_clear_error(strategy3):
    strategy = strategy3
    w = variable(1.0, strategy, name="w")
    even, uneven = (strategy.distribute_dataset([rows]) for rows in (np.ones((6, 3), np.float32), ROWS))
    for position, (what, (mistake, kind, message, remedy)) in enumerate(MISTAKES.items()):
        for batch in (next(iter(even)), next(iter(uneven)))[: 1 + (position % 4 == 0)]:

            def step(x, mistake=mistake):
                w.assign_add(1.0)
                return mistake(w, x)

            with pytest.raises(kind) as caught:
                strategy.run(step, args=(batch,))
            here = rf"{re.escape(__file__)}:\d+"
            assert re.search(f"(?s){message.format(here=here)}.*{remedy}", str(caught.value)), (what, caught.value)
            shown = traceback.format_exception(caught.value)
            assert all(f'File "{__file__}"' in line for line in shown if line.startswith("  File ")), (what, shown)
            if "{here}" in message:
                assert [line.startswith("Traceback") for line in shown].count(True) == 1, (what, shown)
                assert f":{caught.traceback[-1].lineno + 1}" in str(caught.value), what
    assert float(w) == 1.0
    assert strategy.run(lambda x: jnp.sum(x), args=(next(iter(even)),)).num_replicas == 3, "right steps run"


class Holder:
    def __init__(self):
        self.history, self.last, self.shapes = {"loss": []}, None, []

    def step(self, x):
        self.history["loss"].append(jnp.sum(x))
        self.last = x
        self.shapes.append(x.shape)


def test_an_array_that_a_step_keeps_is_warned_of(strategy2):
    losses, by_name, right = [], {}, []

    def step(x):
        loss = jnp.sum(x)
        jax.tree.map(lambda x: losses.append(x), loss)
        by_name["loss"] = loss
        right.append(x.shape)
        return loss

    with pytest.warns(UserWarning) as caught:
        strategy2.run(step, args=(ROWS,))
        strategy2.run(Holder().step, args=(ROWS,))
    told = [str(warning.message).split("`")[1] for warning in caught]
    assert sorted(told) == ["by_name", "losses", "self.history['loss']", "self.last"]
    assert all("x = strategy.run(step), and put x into" in str(warning.message) for warning in caught)
    assert {warning.filename for warning in caught} == {__file__}
    losses.clear()
    losses.append(strategy2.run(lambda x: jnp.sum(x), args=(ROWS,)))
    assert [float(loss) for loss in losses] == [12.0]


def test_what_the_messages_say_to_write_works(strategy2):
    w, place = {"w": variable(1.0, strategy2, name="w")}, variable(2, strategy2)

    def step(x):
        ctx = mr.get_replica_context()
        loss = mr.cond(jnp.sum(x) > 1, lambda: jnp.float32(2.0), lambda: jnp.float32(3.0))
        same = jax.lax.pmean(jnp.mean(x), "replica") - ctx.all_reduce("mean", jnp.mean(x))
        new = optax.apply_updates(jax.tree.map(jnp.asarray, w), {"w": same + jax.lax.exp(w["w"].value) + jnp.exp(w["w"])})
        jax.tree.map(lambda v, n: v.assign(n), w, new, is_leaf=lambda v: isinstance(v, mr.Variable))
        return (
            loss,
            jnp.where(x > 2, x, 0),
            jnp.asarray([5, 6])[x[0, 0].astype(int)],
            x.at[0, place.value].set(3.0)[:, place.value],
        )

    loss, masked, item, column = strategy2.run(step, args=(ROWS,))
    assert float(np.asarray(loss)) == 2.0 and not np.asarray(masked).any() and int(item) == 6
    assert column.tolist() == [3, 1, 1, 1]
    np.testing.assert_allclose(w["w"].numpy(), 1 + 2 * np.e, rtol=1e-6)


def test_a_mistake_in_a_function_is_explained_too(strategy2):
    with pytest.raises(mr.OneProgramError, match=r"(?s)needed the value of an array.*mr\.cond"):
        mr.function(lambda x: 1 if x > 0 else 2)(np.float32(1))
    with pytest.raises(mr.OneProgramError, match=r"needed the value of an array"):
        mr.function(lambda: strategy2.run(lambda x: 1 if x > 0 else 2, args=(np.float32(1),)))()
    message = r"over the axis 'replica' was used outside strategy\.run.*strategy\.reduce\('mean', value\)"
    with pytest.raises(NameError, match=message):
        mr.function(lambda x: jax.lax.psum(x, "replica"))(np.float32(1))


def test_what_jax_says_outside_of_any_call_of_ours_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    with pytest.raises(NameError) as caught:
        jax.lax.pmean(1.0, "replica")
    assert str(caught.value).removeprefix("Found an ").startswith("unbound axis name: replica")
    assert "NameError: Found an unbound axis name: replica" in page


def test_an_nnx_object_that_a_step_or_loop_only_closes_over_is_named() -> None:
    nnx = pytest.importorskip("flax.nnx")
    strategy, xs = strategy_of(2), jnp.arange(24.0).reshape(3, 4, 2)
    norm, linear = nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    loop = lambda: mr.scan(lambda c, x: (c, norm(x)), 0.0, xs)  # noqa: E731
    for wrong in (loop, lambda: strategy.run(loop), lambda: strategy.run(lambda: norm(xs[0])), mr.function(lambda: norm(xs[0]))):
        before = norm.mean[...]
        with pytest.raises(mr.ContextError, match=rf"BatchStat\), at {re.escape(__file__)}:\d+, .*closes over.* model, ys = mr"):
            wrong()
        assert norm.mean[...] is before
    new, ys = mr.scan(lambda model, x: (model, model(x)), norm, xs)  # the message's line
    expected = [norm(x) for x in xs]
    np.testing.assert_allclose(new.mean[...], norm.mean[...], rtol=1e-6)
    np.testing.assert_allclose(ys, jnp.stack(expected), rtol=1e-5, atol=1e-6)
    norm.eval()
    for layer in (norm, linear):
        np.testing.assert_allclose(
            mr.scan(lambda c, x, layer=layer: (c, layer(x)), 0.0, xs)[1], [layer(x) for x in xs], rtol=1e-5, atol=1e-5
        )


def _shard_map(size):
    mesh, rows = jax.sharding.Mesh(np.array(jax.devices()[:size]), ("m",)), jax.sharding.PartitionSpec("m")
    return jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=rows, out_specs=rows)


@pytest.mark.by_xla
@pytest.mark.parametrize(("num_rows", "size", "num_replicas"), [(6, 1, 1), (6, 1, 3), (7, 3, 3), *nightly((6, 3, 1), (7, 1, 1))])
def test_a_map_over_devices_in_a_step_is_refused(num_replicas, size, num_rows):
    """A `jax.pmap` over as many devices as there are replicas ended the process."""
    strategy = strategy_of(num_replicas)
    [batch] = strategy.distribute_dataset([np.ones((num_rows, 2), np.float32)])
    here = rf"{re.escape(__file__)}:\d+"
    for function, where in (
        # In an odd step's merged code, pmap's call is gone, and its line with it.
        (
            lambda x: jax.pmap(lambda x: x + 1)(jnp.ones((size, 2))).sum() + x.sum(),
            here if num_rows == 6 else f"{here}|<unknown>",
        ),
        (lambda x: _shard_map(size)(jnp.ones(6)) + x.sum(), here),
    ):
        if num_replicas == size == 1:
            strategy.run(function, args=(batch,))
            continue
        for run in (strategy.run, mr.function(strategy.run)):
            with pytest.raises(mr.ContextError, match=rf"in a step, at ({where}), .*Leave the map out.*jax\.vmap"):
                run(function, args=(batch,))
    rows = strategy.run(lambda x: jax.vmap(lambda row: row + 1)(x), args=(batch,))
    assert strategy.gather(rows, axis=0).tolist() == [[2, 2]] * num_rows
    assert mr.function(lambda: _shard_map(size)(jnp.ones(6)))().tolist() == [2] * 6, "outside of steps"


#: What places an array on named devices: for several numbers of replicas XLA or JAX failed, with an error of our own code.
PLACED = {
    "device_put": lambda x, place: jax.device_put(x, place),
    "device_put in a loop": lambda x, place: jax.lax.fori_loop(0, jnp.int32(2), lambda i, c: jax.device_put(c, place), x),
    "constraint": lambda x, place: jax.lax.with_sharding_constraint(x, place),
    "in_shardings": lambda x, place: jax.jit(lambda x: x, in_shardings=place)(x),
    "out_shardings": lambda x, place: jax.jit(lambda x: x, out_shardings=place)(x),
    "callback": lambda x, place: jax.pure_callback(lambda x: x, x, x, sharding=place),
}


@pytest.mark.by_xla
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_step_names_no_devices(num_replicas):
    strategy = strategy_of(num_replicas)
    one, two = jax.devices()[0], jax.sharding.Mesh(np.array(jax.devices()[:2]), ("m",))
    for place in (jax.sharding.SingleDeviceSharding(one), jax.sharding.NamedSharding(two, jax.P("m"))):
        for kind, put in PLACED.items():
            step = lambda x, put=put, place=place: put(x, place)  # noqa: E731
            if kind == "callback" and place.num_devices > 1:
                continue
            for run in (strategy.run, mr.function(strategy.run)):
                with pytest.raises(mr.ContextError, match=rf"places .* at {re.escape(__file__)}:\d+, .*one device\. Leave out"):
                    run(step, args=(ROWS,))
    for put in (PLACED["device_put"], PLACED["constraint"], PLACED["out_shardings"]):
        np.testing.assert_array_equal(mr.function(lambda x, put=put: put(x, strategy._mesh.mirrored))(ROWS), ROWS)
    here = lambda x: jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))(jax.device_put(x))  # noqa: E731
    np.testing.assert_array_equal(strategy.run(here, args=(ROWS,)), ROWS)


#: Ordered prints and callbacks, in a step, in a loop of a step, of an odd batch, in a function: `order` says whether.
PRINTS = {
    "print": lambda s, order: s.run(lambda x: jax.debug.print("{}", x.sum(), ordered=order), args=(ROWS,)),
    "callback in a loop": lambda s, order: s.run(
        lambda: mr.fori_loop(0, 2, lambda i, c: jax.debug.callback(lambda i: None, i, ordered=order) or c, 0)
    ),
    "of a function": lambda s, order: mr.function(
        lambda x: (s.run(lambda: jnp.ones(2)), jax.debug.callback(lambda x: None, x, ordered=order))
    )(jnp.ones(2)),
    "odd": lambda s, order: s.run(
        lambda x: jax.debug.print("{}", x.sum(), ordered=order), args=(next(iter(s.distribute_dataset([np.ones((7, 2))]))),)
    ),
}


@pytest.mark.parametrize("what", PRINTS)
def test_an_ordered_print_is_refused_on_several_devices(what):
    for strategy in (strategy_of(1), strategy_of(1, num_replicas=3)):
        with strategy.scope():
            PRINTS[what](strategy, True)
    for strategy in (strategy_of(2), strategy_of(2, num_replicas=4)):
        message = (
            rf"ordered=True, at {re.escape(__file__)}:\d+\. .* on {len(strategy.mesh.devices)} devices\. Leave ordered=True out"
        )
        with strategy.scope():
            with pytest.raises(ValueError, match=message):
                PRINTS[what](strategy, True)
            PRINTS[what](strategy, False)
    jax.effects_barrier()


def test_a_number_of_a_verb_of_ours_is_not_blamed():
    with pytest.raises(TypeError, match="unhashable type"):
        mr.fori_loop(0, 3, lambda i, c: {0: 1}[i], 0)
