"""Before several workers run a program they agree on it, and the guard hears of every start."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirrored._workers import joint_programs, runtime
from mirrored._workers.coordination import digest
from mirrored._workers.progress import Progress


class Heard:
    """What this worker said to the others and to the guard, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checks_order: bool = False) -> None:
        self.said: list[tuple[str, str, int]] = []
        self.progress = Progress()
        agreement = SimpleNamespace(
            check=self.check,
            checks_order=checks_order,
        )
        monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(agreement=agreement))
        monkeypatch.setattr(joint_programs, "progress", self.progress)

    def check(self, name: str, text: str, own: bytes, where: str) -> None:
        assert own == digest(text).encode() and where.startswith("test_joint_programs.py:"), "where the user has called it"
        self.said.append((name, text, self.progress.started))
        self.progress.habits.next = own


def test_a_program_is_agreed_on_and_compiled_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch)
    seen: list[tuple[int, list[tuple[str, bool]]]] = []

    class Program:
        def lower(self, *arguments: Any) -> Any:
            seen.append((heard.progress.started, [(phase.text, phase.is_patient) for phase in heard.progress.phases]))
            return SimpleNamespace(compile=lambda: None)

        def __call__(self, x: int) -> int:
            seen.append((heard.progress.started, []))
            return x + 1

    program = joint_programs.prepared("train", "the text", Program())
    assert heard.said == [("train", "the text", 0)], "before it is compiled, which may take minutes"
    assert [program(1), program(2)] == [2, 3]
    assert seen == [(0, [("compiling train", True)]), (1, []), (2, [])]
    assert heard.progress.program == "train" and heard.said == [("train", "the text", 0)], "nothing per step"


@pytest.mark.parametrize("checks_order", [False, True])
def test_in_the_debug_mode_every_start_is_compared_before_it(monkeypatch: pytest.MonkeyPatch, checks_order: bool) -> None:
    heard = Heard(monkeypatch, checks_order)
    program = joint_programs.started("train", "the text", lambda x: x * 2)
    assert [program(1), program(2)] == [2, 4]
    assert heard.said == [("train", "the text", number) for number in ((0, 1) if checks_order else (0,))]


@pytest.mark.parametrize(
    ("order", "compared"),
    [
        ("tttttttt", [0]),  # a program is expected again
        ("trtrtrtr", [0, 1, 2]),  # and then what has followed it: a step and a reduction, or two steps of a GAN
        ("tttetttetttette", [0, 3, 4, 14]),  # as often as the last time: epochs of one length, and one that is shorter
        ("tteettteetttee", [0, 2, 4, 6, 7]),  # one that is longer
        ("dddgdddgdddg", [0, 3, 4]),
    ],
)
def test_only_what_is_not_expected_is_compared(monkeypatch: pytest.MonkeyPatch, order: str, compared: list[int]) -> None:
    heard = Heard(monkeypatch)
    programs = {name: joint_programs.started(name, name, lambda: None) for name in set(order)}
    for name in order:
        programs[name]()
    assert [number for _, _, number in heard.said] == compared


def test_every_new_shape_and_dtype_of_an_array_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch)
    total = joint_programs.agreed("reduce", " sum", jax.jit(jnp.sum))
    for array in (jnp.ones(3), jnp.ones(3), jnp.ones(3, int), jnp.ones((3, 1)), jnp.ones(3)):
        np.testing.assert_array_equal(total(array), 3)
    kinds = ["float32[3]", "int32[3]", "float32[3, 1]"]
    assert heard.said[:-1] == [("reduce", f"reduce sum of {kind}", n) for kind, n in zip(kinds, (0, 2, 3), strict=True)]
    assert heard.said[-1] == ("reduce", "reduce sum of float32[3]", 4) and heard.progress.started == 5
    jax.eval_shape(total, jnp.ones(7))
    assert len(heard.said) == 4 and heard.progress.started == 5, "a part of a larger program, which is agreed on as a whole"


def test_a_step_is_what_users_count(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch)
    program = SimpleNamespace(lower=lambda *_: SimpleNamespace(compile=lambda: None))
    reduce = joint_programs.started("reduce", "sum", lambda: None)
    predict = joint_programs.prepared("predict", "predict", program, is_run=True)
    train = joint_programs.prepared("train", "train", program, is_run=True, is_update=True)
    for announced, count, step in ((reduce, 1, 0), (predict, 3, 3), (train, 5, 5), (predict, 1, 5)):
        for _ in range(count):
            announced.announce()
        assert heard.progress.step == step, "runs, where nothing is trained; then updates"
