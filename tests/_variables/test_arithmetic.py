"""The operators of a variable; those of values are in test_variable.py."""

import operator

import numpy as np
import pytest

import mirrored as mr

LINES = {
    "isub": r"`-=` on variable 'w' .* Write variable\.assign_sub\(x\); or y = variable - x",
    "iadd": r"`\+=` .* Write variable\.assign_add\(x\)",
    "imul": r"`\*=` .* Write variable\.assign\(variable \* x\)",
    "imatmul": r"`@=` .* Write variable\.assign\(variable @ x\)",
}


@pytest.mark.parametrize("name", LINES)
def test_in_place_is_refused_with_the_line_and_changes_nothing(strategy2: mr.Strategy, name: str) -> None:
    class Model:
        w = mr.Variable(np.ones(2, "float32"), name="w")

    for call in (lambda function: function(), strategy2.run):
        with pytest.raises(TypeError, match=LINES[name]):
            call(lambda: setattr(Model, "w", getattr(operator, name)(Model.w, 2.0)))
    assert isinstance(Model.w, mr.Variable) and Model.w.numpy().tolist() == [1, 1]


def test_a_new_array_is_another_line() -> None:
    w = mr.Variable(np.ones(2, "float32"))
    total = w + 0.0
    total -= 1.0
    total *= w
    assert total.tolist() == [0, 0] and w.numpy().tolist() == [1, 1]
    x = np.ones(2)
    x += w.numpy()
    assert x.tolist() == [2, 2]
