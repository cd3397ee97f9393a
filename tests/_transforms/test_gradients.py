"""mr.grad and mr.value_and_grad: gradients with respect to variables, the numbers of plain jax.grad."""

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import TWO, all_reduce, numbers, variable

import mirrored as mr

pytestmark = [pytest.mark.usefixtures("in_numpy"), pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")]

OUTSIDE_AND_IN_A_STEP = (lambda fn: fn(), lambda fn: TWO.run(fn))


def test_gradients_in_a_step_are_this_replicas_own(strategy3):
    w = variable(3.0, strategy3)
    own = variable(1.0, strategy3, synchronization="on_read", aggregation="sum")
    total = lambda x: all_reduce("sum", w * x)  # noqa: E731

    def step(x):
        loss, gradient = mr.value_and_grad(lambda: w**2 * x, w)()
        return loss, gradient, mr.grad(lambda: own * x, own)(), mr.grad(total, w)(x)

    results = [[float(value) for value in result.values] for result in strategy3.run(step, args=(numbers(strategy3, 1),))]
    # Through a collective come the sums of all replicas' gradients, as in TensorFlow.
    assert results == [[9.0, 18.0, 27.0], [6.0, 12.0, 18.0], [1.0, 2.0, 3.0], [3.0, 6.0, 9.0]]


def test_gradients_are_a_tree_like_the_variables_with_their_dtypes_at_their_values():
    w, other, unused = variable(3.0), variable(2.0), variable(np.ones(2, np.float32))
    gradient = mr.grad(lambda x, *, factor: w * other * x * factor, {"w": w, "unused": [unused]})
    for value in (2.0, 3.0):
        other.assign(value)
        found = gradient(np.float32(2), factor=5)
        assert (float(found["w"]), found["unused"][0].tolist()) == (10.0 * value, [0.0, 0.0])
    ones = {dtype: variable(np.ones(2, dtype)) for dtype in ("float16", "bfloat16", "complex64")}
    loss = lambda: sum(jnp.sum(jnp.abs(w.value) ** 2).astype(jnp.float32) for w in ones.values())  # noqa: E731
    found = TWO.run(lambda: mr.grad(loss, ones)())
    assert {dtype: (gradient.dtype, gradient.shape) for dtype, gradient in found.items()} == {d: (d, (2,)) for d in ones}


def test_what_the_loss_writes_is_kept():
    w, mean = variable(3.0), variable(0.0, aggregation="mean")
    count = variable(0, synchronization="on_read", aggregation="sum")

    def loss(x):
        mean.assign(mean * 0.5 + x)
        count.assign_add(1)
        return w * x

    def step(x):
        return mean.value, mr.grad(loss, w)(x), mean.value

    for _ in range(2):
        before, gradient, after = TWO.run(step, args=(numbers(TWO, 1),))
    assert [float(value) for value in gradient.values] == [1.0, 2.0]
    # The mean over the replicas of (old mean / 2 + x): 1.5, then 0.75 + 1.5.
    assert (float(before), float(after), float(mean), int(count)) == (1.5, 2.25, 2.25, 4)

    def squared():
        result = w**2
        w.assign(10.0)
        return result * w  # the new value is a constant

    for run in OUTSIDE_AND_IN_A_STEP:
        w.assign(3.0)
        value, gradient = run(lambda: mr.value_and_grad(squared, w)())
        assert (float(value), float(gradient), float(w)) == (90.0, 60.0, 10.0), "also of the variable itself"


def test_gradients_of_gradients_and_of_loops():
    w, count = variable(3.0), variable(0)

    def cube():
        count.assign_add(1)
        return w**3

    def all_of_them():
        second = mr.grad(mr.grad(cube, w), w)()
        through_a_loop = mr.grad(lambda: mr.scan(lambda c, _: (c * w, None), 1.0, length=3)[0], w)()
        in_a_loop = mr.scan(lambda c, _: (c, mr.grad(cube, w)()), None, length=2)[1]
        return second, through_a_loop, in_a_loop, mr.grad(lambda: mr.cond(w > 0, lambda: w**2, lambda: -w), w)()

    for run in OUTSIDE_AND_IN_A_STEP:
        count.assign(0)
        assert [np.asarray(x).tolist() for x in run(all_of_them)] == [18.0, 27.0, [27.0, 27.0], 6.0]
        assert int(count) == 3


def test_aux_may_be_anything():
    w = variable(3.0)
    loss = lambda: (w * 1.0, {"x": w * 2, "text": "t", "none": None, "w": w})  # noqa: E731
    gradient, aux = mr.grad(loss, w, has_aux=True)()
    assert (float(gradient), float(aux["x"]), aux["text"], aux["none"], aux["w"]) == (1.0, 6.0, "t", None, w)
