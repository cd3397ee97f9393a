"""What the command tries: how many rows fit, and what makes a script fit. Whole commands are in test_compiled.py."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored import _process, launch
from mirrored._jax import topologies
from mirrored._plan import command, trials
from mirrored._plan.trials import Command, Trial, most_rows, plan_with, remedies
from mirrored._replicas import cross_replica, division


@pytest.mark.parametrize(
    ("limit", "start", "found", "calls"),
    [
        (0, 16, (0, 1), 5),
        (1, 16, (1, 2), 5),
        (7, 1, (7, 8), 6),
        (16, 16, (16, 18), 5),
        (100, 100, (100, 104), 5),
        (620, 16, (576, 640), 10),
        (10**9, 1, (2**20, 0), 21),
    ],
)
def test_the_most_rows_that_fit_are_found_to_an_eighth(limit, start, found, calls) -> None:
    asked = []
    assert most_rows(lambda rows: asked.append(rows) or rows <= limit, start) == found
    assert len(asked) == calls and len(set(asked)) == calls


def trial(fits, rows=16, replicas=8, needs="?", arguments=()):
    return Trial(fits, needs, rows, replicas, [list(arguments)], "the whole plan")


def fake_plans(monkeypatch, answer):
    """Let trials answer without a plan; return the flags of each."""
    asked = []

    def plan(command, *flags):
        asked.append(flags)
        return answer(*flags)

    monkeypatch.setattr(trials, "plan_with", plan)
    monkeypatch.setattr(command, "plan_with", plan)
    return asked


def test_each_remedy_is_tried_and_its_line_says_what_to_write_and_what_it_needs(monkeypatch) -> None:
    def answer(flag, value=0, *rows):
        if flag in ("--shard-state", "--storage=parts"):
            return trial(False, needs="70 GiB of 60 GiB")
        return trial(value >= 4, replicas=8 * value, needs="50 GiB") if flag == "--parts" else trial(value <= 4, needs="40 GiB")

    asked = fake_plans(monkeypatch, answer)
    assert list(remedies(Command([], []), trial(False))) == [
        "with mr.Optimizer(..., shard_state=True) it needs 70 GiB of 60 GiB: does not fit",
        'with mr.MirroredStrategy(storage="parts") it needs 70 GiB of 60 GiB: does not fit',
        'with mr.MirroredStrategy(num_replicas=32, schedule="one_by_one") and 4 rows on each, the same batch in 4 parts, '
        "it needs 50 GiB: fits",
        "with 4 rows on each replica, in place of 16, it needs 40 GiB: fits",
    ]
    assert asked[:2] == [("--shard-state",), ("--storage=parts",)] and asked[2:] == [
        ("--parts", 2, "--rows", 8),
        ("--parts", 4, "--rows", 4),
        ("--rows", 8),
        ("--rows", 4),
    ]


def test_what_fails_or_changes_nothing_is_no_remedy(monkeypatch) -> None:
    asked = fake_plans(monkeypatch, lambda flag, *values: trial(False) if flag == "--parts" else None)
    assert list(remedies(Command([], []), trial(False))) == []
    assert asked[:2] == [("--shard-state",), ("--storage=parts",)] and asked[2:] == [("--parts", 2, "--rows", 8), ("--rows", 8)]
    fake_plans(monkeypatch, lambda *flags: None)
    assert list(remedies(Command([], []), trial(False, rows=0))) == []


def test_the_command_finds_the_batch_and_prints_its_plan(monkeypatch, capsys) -> None:
    first = trial(True, arguments=["float32[8,16]"])
    fake_plans(monkeypatch, lambda *flags: trial(flags[1] <= 40, arguments=[f"float32[8,{flags[1]}]"]) if flags else first)
    assert command._find_batch(Command([], [])) == 0
    said = capsys.readouterr()
    assert said.out.startswith("40 rows fit on each replica, a batch of 320, 44 do not\n\nthe whole plan")
    assert "with 32 rows on each replica it needs ?: fits" in said.err


def test_rows_that_no_dataset_gives_are_not_found_nor_less_than_one(monkeypatch, capsys) -> None:
    for rows in (0, 16):
        fake_plans(monkeypatch, lambda *flags, rows=rows: trial(True, rows=rows))
        assert command._find_batch(Command([], [])) == 1
        said = capsys.readouterr()
        assert "cannot be changed" in said.err and said.out == ""
    fake_plans(monkeypatch, lambda *flags: trial(False, needs="9 GiB", arguments=map(str, flags)))
    assert command._find_batch(Command([], [])) == 1
    assert "does not fit: with 1 row on each replica it needs 9 GiB" in capsys.readouterr().out


def test_the_command_asks_for_no_accelerator_before_jax_looks_for_one(monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")  # restored afterwards
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(SystemExit):
        launch.main(["plan", "--topology", "v5e:2x4", "no_such.py"])
    assert os.environ.pop("JAX_PLATFORMS") == "cpu"


def test_a_script_that_fails_is_shown(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "mirrored.py").write_text("raise SystemExit('mirrored plan: there is no file')")  # the real one takes a second
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert plan_with(Command(["--topology", "v5e:2x4"], [str(tmp_path / "no.py")]), "--rows", 3) is None
    assert "the script fails with --rows 3:\nmirrored plan: there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(("what_if", "rows", "replicas"), [({}, 4, 3), ({"rows": 7}, 7, 3), ({"parts": 2}, 2, 6)])
def test_a_planned_program_has_the_rows_and_parts_that_the_command_says(what_if, rows, replicas, monkeypatch) -> None:
    monkeypatch.setattr(topologies, "runs_nothing", lambda device: True)
    monkeypatch.setattr(cross_replica, "_compile", cross_replica._compile.__wrapped__)  # nothing is kept of these devices
    monkeypatch.setattr(_process, "what_if", _process.WhatIf(**what_if, shard_state="parts" not in what_if))
    monkeypatch.setattr(division, "LEAST_BYTES", 64)
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        w = mr.Variable(jax.ShapeDtypeStruct((64, 8), jnp.float32))
        optimizer = mr.Optimizer(optax.adam(0.1), [w])
    batches = [np.zeros((12, 64), np.float32), np.zeros((11, 64), np.float32)]
    [first, last] = strategy.distribute_dataset(batches)
    strategy.run(lambda x: optimizer.minimize(lambda: jnp.square(x @ w).mean(-1)), args=(first,))
    [program] = mr.plan(strategy).programs
    assert program.arguments == (f"float32[{replicas},{rows},64]",) and mr.plan(strategy).replicas == replicas
    assert program.memory.state < 2 * 4 * 64 * 8 if "parts" not in what_if else program.memory.state >= 2 * 4 * 64 * 8
    assert last.shape == ((7, 64) if what_if.get("rows") else last.shape)
    assert _process.what_if.given_rows == (0 if what_if.get("rows") else -(-11 // replicas))


def test_devices_that_are_here_get_the_rows_of_the_dataset(monkeypatch) -> None:
    monkeypatch.setattr(_process, "what_if", _process.WhatIf(rows=7))
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])  # these devices are here
    [first, last] = strategy.distribute_dataset([np.zeros((12, 2), np.float32), np.zeros((11, 2), np.float32)])
    assert first.shape == (4, 2) and [value.shape for value in last.values] == [(4, 2), (4, 2), (3, 2)]
