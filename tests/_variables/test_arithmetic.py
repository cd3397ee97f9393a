"""The operators of a variable; those of values are in test_variable.py."""

import operator

import numpy as np
import pytest

import mirrored as mr


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("isub", r"`-=` on variable 'w' .* Write variable\.assign_sub\(x\); or y = variable - x"),
        ("iadd", r"`\+=` .* Write variable\.assign_add\(x\)"),
        ("imul", r"`\*=` .* Write variable\.assign\(variable \* x\)"),
        ("itruediv", r"`/=` .* Write variable\.assign\(variable / x\)"),
        ("imatmul", r"`@=` .* Write variable\.assign\(variable @ x\)"),
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_in_place_is_refused_with_the_line_and_changes_nothing(num_replicas: int, name: str, line: str) -> None:
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        w = mr.Variable(np.ones(2, "float32"), name="w")
    for call in (lambda function: function(), strategy.run):
        with pytest.raises(TypeError, match=line):
            call(lambda: getattr(operator, name)(w, 2.0))
    assert w.numpy().tolist() == [1, 1]


def test_on_an_attribute_and_on_a_global_too() -> None:
    class Model:
        w = mr.Variable(1.0, name="of_model")

    model, namespace = Model(), {"v": mr.Variable(1.0)}

    def step() -> None:
        model.w -= 1.0

    exec("def of_a_global():\n    global v\n    v -= 1.0", namespace)
    for function in (step, namespace["of_a_global"]):
        with pytest.raises(TypeError, match=r"assign_sub\(x\)"):
            mr.MirroredStrategy(["cpu:0"]).run(function)
    assert isinstance(model.w, mr.Variable)


def test_a_new_array_is_another_line() -> None:
    w = mr.Variable(np.ones(2, "float32"))
    total = w + 0.0
    total -= 1.0
    total *= w
    assert total.tolist() == [0, 0] and w.numpy().tolist() == [1, 1]
    x = np.ones(2)
    x += w.numpy()
    assert x.tolist() == [2, 2]
