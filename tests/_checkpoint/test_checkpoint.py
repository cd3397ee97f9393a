"""Checkpoints: what is saved comes back exactly, and what cannot is said before anything changes."""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
import zlib
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mirrored as mr
from mirrored._checkpoint import checksums, same_on_workers
from mirrored._checkpoint import files as _files
from mirrored._checkpoint import state as _state
from mirrored._checkpoint.checkpoint import Checkpoint
from mirrored._checkpoint.writer import Writer
from mirrored._errors import CheckpointError
from mirrored._workers.coordination import Coordination
from mirrored._workers.progress import progress

ALL_DEVICES = [f"cpu:{i}" for i in range(8)]

Pair = namedtuple("Pair", "first second")


def on(num_replicas: int) -> mr.MirroredStrategy:
    return mr.MirroredStrategy(ALL_DEVICES[:num_replicas])


def quiet(*effects: object) -> None:
    """Return nothing, whatever its arguments do."""


def save(directory: Path, step: int, /, **named: object) -> None:
    with Checkpoint(directory, **named) as checkpoint:
        checkpoint.save(step)


def restore(directory: Path, /, **named: object) -> int | None:
    with Checkpoint(directory, **named) as checkpoint:
        return checkpoint.restore_latest()


def files_of(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# -- what is saved comes back


def test_values_of_every_dtype_come_back_exactly(tmp_path: Path) -> None:
    names = "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64 bfloat16 int4 uint4 float8_e4m3fn float8_e5m2"
    values = {name: np.array([[0, 1, 1]]).astype(np.dtype(getattr(ml_dtypes, name, name))) for name in names.split()}
    variables = {name: mr.Variable(value) for name, value in values.items()}
    wide = {name: np.array([3, -1]).astype(name) for name in ("int64", "float64", "complex128", ">i4", ">f8")}
    save(tmp_path, 1, variables=variables, arrays=dict(values), wide=dict(wide))
    for variable in variables.values():
        variable.assign(jnp.zeros(variable.shape, variable.dtype))
    arrays = {name: np.zeros_like(value) for name, value in values.items()}
    others = {name: np.zeros_like(value) for name, value in wide.items()}
    assert restore(tmp_path, variables=variables, arrays=arrays, wide=others) == 1
    for name, value in values.items():
        assert variables[name].numpy().tobytes() == value.tobytes() == arrays[name].tobytes(), name
    for name, value in wide.items():
        np.testing.assert_array_equal(others[name], value)
        assert others[name].dtype == value.dtype


def test_special_floats_scalars_empty_arrays_and_keys_come_back(tmp_path: Path) -> None:
    special = np.array([np.nan, -np.nan, np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    special.view(np.uint32)[0] = 0x7FC01234  # a NaN with a payload
    state = {
        "special": special.copy(), "empty": np.zeros((0, 3), np.int32), "scalar": np.float32(2.5), "jax": jnp.arange(3),
        "key": jax.random.key(7), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3), "int": 10**30,
        "float": float("-inf"), "bool": True, "complex": 1 - 2j, "none": None, "nothing": [],
    }  # fmt: skip
    keys = mr.Variable(jax.random.split(jax.random.key(3), 2))
    save(tmp_path, 0, state=state, keys=keys)
    drawn = jax.random.normal(keys.value[1])
    keys.assign(jax.random.split(jax.random.key(9), 2))
    new = {
        "special": np.zeros(6, np.float32), "empty": np.ones((0, 3), np.int32), "scalar": np.float32(0),
        "jax": jnp.zeros(3, jnp.int32), "key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "int": 0, "float": 0.0, "bool": False, "complex": 0j, "none": None, "nothing": [],
    }  # fmt: skip
    assert restore(tmp_path, state=new, keys=keys) == 0
    assert new["special"].tobytes() == special.tobytes()
    assert new["scalar"] == np.float32(2.5) and type(new["scalar"]) is np.float32
    assert (new["int"], new["float"], new["bool"], new["complex"]) == (10**30, float("-inf"), True, 1 - 2j)
    assert isinstance(new["jax"], jax.Array) and new["jax"].tolist() == [0, 1, 2]
    assert jax.random.uniform(new["key"]) == jax.random.uniform(jax.random.key(7))
    assert jnp.array_equal(jax.random.key_data(new["keys"]), jax.random.key_data(state["keys"]))
    assert jax.random.normal(keys.value[1]) == drawn


def test_restored_values_take_their_place_in_nests(tmp_path: Path) -> None:
    def make(x: float) -> dict[str, object]:
        return {
            "deep": [Pair(x, (jnp.full(2, x), {"a": x})), OrderedDict(b=x)],
            "optax": optax.adam(0.1).init({"w": jnp.full(3, x)}),
            1: x, "1": x + 1, "a/b": x, "..": x, "nul\0": x, "['a']": x,
        }  # fmt: skip

    with pytest.raises(ValueError, match="sorting pytree dictionary keys"):
        Checkpoint(tmp_path, state={1: 0.0, "1": 0.0})
    old, new = make(1.5), make(0.0)
    del old[1], new[1]
    deep, inner = new["deep"], new["deep"][0].second[1]
    save(tmp_path, 4, state=old)
    assert restore(tmp_path, state=new) == 4
    assert new["deep"] is deep and new["deep"][0].second[1] is inner
    assert isinstance(new["deep"][0], Pair) and isinstance(new["deep"][1], OrderedDict)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    jax.tree.map(np.testing.assert_array_equal, new, old)
    assert not (tmp_path.parent / "b").exists() and {p.name for p in tmp_path.iterdir()} == {"4"}


def test_optimizer_and_step_go_on_as_if_never_interrupted(tmp_path: Path) -> None:
    def train(strategy: mr.Strategy, directory: Path, num_steps: int, until: int) -> tuple[np.ndarray, int]:
        with strategy.scope():
            w = mr.Variable(np.ones(3, np.float32), name="w")
            optimizer = mr.Optimizer(optax.adam(0.1), [w])
            checkpoint = Checkpoint(directory, w=w, optimizer=optimizer)
        first = checkpoint.restore_latest() or 0

        def step(x: jax.Array) -> None:
            _, gradients = mr.value_and_grad(lambda: jnp.sum(w * w * x), [w])()
            optimizer.apply_gradients(gradients)

        for number in range(first + 1, min(first + num_steps, until) + 1):
            strategy.run(step, args=(strategy.distribute_values_from_function(lambda ctx: np.float32(number)),))  # noqa: B023
            checkpoint.save(number)
        checkpoint.close()
        return w.numpy(), first

    whole, _ = train(on(2), tmp_path / "whole", 7, 7)
    train(on(2), tmp_path / "parts", 3, 7)
    parts, first = train(on(2), tmp_path / "parts", 4, 7)
    assert first == 3
    assert parts.tobytes() == whole.tobytes()
    other, first = train(on(3), tmp_path / "parts", 1, 7)
    assert first == 7 and other.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("worker", "num_workers", "expected"), [(0, 2, "of 0"), (1, 2, "of 1"), (0, 1, "of 0"), (1, 3, "of 0"), (2, 3, "of 0")]
)
def test_each_worker_gets_back_its_own_position(worker: int, num_workers: int, expected: str) -> None:
    """And that of the first when their number has changed, which an iterator may refuse."""

    class Rows:
        state = "before"

        def get_state(self) -> str:
            return self.state

        def set_state(self, state: str) -> None:
            self.state = state

    leaves = {"data": Rows()}
    saved = _state.take_snapshot(leaves, [{"data": "of 0"}, {"data": "of 1"}], is_kept=True)
    moved = _state.restore_positions(leaves, saved, worker, num_workers)
    assert leaves["data"].state == expected
    _state.undo_positions(moved)
    assert leaves["data"].state == "before"


@pytest.mark.parametrize("kind", ["numpy", "files"])
def test_no_example_is_repeated_or_lost_across_numbers_of_replicas(tmp_path: Path, kind: str) -> None:
    batches = [np.arange(i, min(i + 5, 43)) for i in range(0, 43, 5)]
    seen: list[int] = []
    for attempt, num_replicas in enumerate([2, 3, 1, 2]):
        strategy = on(num_replicas)
        dataset = batches if kind == "files" else strategy.make_numpy_dataset(np.arange(43)).shuffle(seed=3).batch(5)
        with iter(strategy.distribute_dataset(dataset)) as iterator, Checkpoint(tmp_path, data=iterator) as checkpoint:
            start = checkpoint.restore_latest() or 0
            for step, batch in zip(range(start + 1, start + 3 + attempt), iterator, strict=False):
                seen += [int(row) for value in batch.values for row in value]
                checkpoint.save(step)
    assert len(seen) == 43 and sorted(seen) == list(range(43))


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica", "none"])
def test_sync_on_read_with_the_same_replicas_is_bit_identical(tmp_path: Path, aggregation: str, strategy, per_replica) -> None:
    with strategy.scope():
        v = mr.Variable(np.zeros(2, np.float32), synchronization="on_read", aggregation=aggregation)
        count = strategy.num_replicas_in_sync
        values = per_replica(strategy, *(np.array([0.1 * i, np.nan if i == 0 else 7], np.float32) for i in range(count)))
        strategy.run(lambda x: quiet(v.assign(x)), args=(values,))
        before = np.asarray(v._array).tobytes()
        save(tmp_path, 1, v=v)
        strategy.run(lambda: quiet(v.assign(v * 0)))
        assert restore(tmp_path, v=v) == 1
        assert np.asarray(v._array).tobytes() == before


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 2), (2, 8), (8, 1)])
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_sync_on_read_with_other_replicas_keeps_its_value(tmp_path: Path, aggregation: str, old: int, new: int, per_replica):
    dtype = np.int32 if aggregation != "mean" else np.float32
    with on(old).scope() as strategy:
        v = mr.Variable(np.zeros(2, dtype), synchronization="on_read", aggregation=aggregation)
        values = per_replica(strategy, *(np.array([i + 1, 10 * i]).astype(dtype) for i in range(old)))
        strategy.run(lambda x: quiet(v.assign(x)), args=(values,))
        value = v.numpy()
        save(tmp_path, 1, v=v)
    with on(new).scope():
        v = mr.Variable(np.zeros(2, dtype), synchronization="on_read", aggregation=aggregation)
        assert restore(tmp_path, v=v) == 1
        np.testing.assert_array_equal(v.numpy(), value)


def test_aggregation_none_needs_the_same_replicas_and_says_so(tmp_path: Path) -> None:
    with on(2).scope():
        v, w = mr.Variable([1.0, 2.0], synchronization="on_read"), mr.Variable(5.0)
        save(tmp_path, 1, v=v, w=w)
    with on(3).scope():
        v, w = mr.Variable([0.0, 0.0], synchronization="on_read"), mr.Variable(0.0)
        with pytest.raises(CheckpointError, match=r"v was saved as 2 values, .* aggregation NONE.* on 3 replicas. Restore on 2"):
            restore(tmp_path, v=v, w=w)
        assert float(w) == 0.0


def test_mirrored_sync_on_read_and_plain_are_exchangeable(tmp_path: Path, per_replica) -> None:
    def make(kind: str) -> object:
        if kind == "mirrored":
            return mr.Variable(np.zeros(2, np.float32))
        if kind == "jax":
            return {"x": jnp.zeros(2)}
        if kind == "numpy":
            return {"x": np.zeros(2, np.float32)}
        return mr.Variable(np.zeros(2, np.float32), synchronization="on_read", aggregation=kind)

    kinds = ["mirrored", "sum", "mean", "jax", "numpy"]
    for source in kinds:
        with on(3).scope() as strategy:
            thing = make(source)
            if source in ("sum", "mean"):
                strategy.run(
                    lambda x, v=thing: quiet(v.assign(x)), args=(per_replica(strategy, *np.eye(3, 2, dtype=np.float32)),)
                )
                expected = thing.numpy()
            elif source == "mirrored":
                expected = thing.assign([3.0, 4.0]).numpy()
            else:
                expected = np.array([5.0, 6.0], np.float32)
                thing["x"] = jnp.asarray(expected) if source == "jax" else expected
            save(tmp_path / source, 1, **({"v": thing} if isinstance(thing, mr.Variable) else {"v": {"x": thing["x"]}}))
        for target in kinds:
            with on(2).scope():
                new = make(target)
                is_nest = isinstance(new, dict)
                if is_nest != (source in ("jax", "numpy")):
                    continue  # their paths differ: v and v['x']
                assert restore(tmp_path / source, v=new) == 1
                value = new["x"] if is_nest else new.numpy()
                np.testing.assert_array_equal(value, expected)
        with on(2).scope():
            target = np.zeros(2, np.float32)
            if source in ("mirrored", "sum", "mean"):
                assert restore(tmp_path / source, v=target) == 1
                np.testing.assert_array_equal(target, expected)


def test_a_save_does_not_see_what_later_steps_do(tmp_path: Path, strategy2: mr.Strategy, monkeypatch) -> None:
    gate = threading.Event()
    write = _files.StepFiles.write
    monkeypatch.setattr(_files.StepFiles, "write", lambda *args: gate.wait(60) and write(*args))
    with strategy2.scope():
        w, n = mr.Variable(np.ones(1000, np.float32)), mr.Variable(1, synchronization="on_read", aggregation="sum")
        host, state = np.ones(5), {"epoch": 1}
        with Checkpoint(tmp_path, w=w, n=n, host=host, state=state) as checkpoint:
            checkpoint.save(1)
            assert checkpoint.steps() == []
            for _ in range(3):  # donates the buffers
                strategy2.run(lambda: quiet(w.assign(w * 2), n.assign_add(5)))
            host[:] = 9
            state["epoch"] = 2
            gate.set()
            assert checkpoint.wait() == 1
            assert checkpoint.restore_latest() == 1
        assert w.numpy().tolist() == [1.0] * 1000 and int(n) == 2 and host.tolist() == [1.0] * 5 and state == {"epoch": 1}


def test_the_guard_is_told_where_workers_wait(tmp_path: Path, monkeypatch) -> None:
    waits: list[str] = []
    exchange = Coordination.exchange

    def noted(self, channel: str, value: object) -> Sequence[object]:
        waits.append(progress.phases[-1].text)
        return exchange(self, channel, value)

    monkeypatch.setattr(Coordination, "exchange", noted)
    with Checkpoint(tmp_path, w=mr.Variable(0.0)) as checkpoint:
        checkpoint.restore_latest()
        checkpoint.save(1)
    assert waits == ["checkpoint.restore_latest()", "checkpoint.save(1)", "checkpoint.wait()"], "it says: waits at ..."


def test_one_save_at_a_time(tmp_path: Path, monkeypatch) -> None:
    running, most = [], []
    write = _files.StepFiles.write

    def counted(*args):
        running.append(1)
        most.append(len(running))
        result = write(*args)
        running.pop()
        return result

    monkeypatch.setattr(_files.StepFiles, "write", counted)
    w = mr.Variable(0.0)
    with Checkpoint(tmp_path, max_to_keep=None, w=w) as checkpoint:
        for step in range(5):
            checkpoint.save(step)
    assert most == [1] * 5 and checkpoint.steps() == [0, 1, 2, 3, 4]


# -- steps, retention, what is in the directory


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, max_to_keep=2, w=mr.Variable(0.0)) as checkpoint:
        for step in (1, 5, 9, 10, 100):
            checkpoint.save(step)
            checkpoint.wait()
            assert checkpoint.steps()[-1] == step and len(checkpoint.steps()) <= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "100"]


def test_the_same_step_is_saved_once_and_an_older_one_is_refused(tmp_path: Path, caplog) -> None:
    w = mr.Variable(1.0)
    with Checkpoint(tmp_path, w=w) as checkpoint, caplog.at_level(logging.INFO, "mirrored"):
        checkpoint.save(5)
        checkpoint.save(5)
        assert "step 5 is saved already" in caplog.text
    w.assign(2.0)
    with Checkpoint(tmp_path, w=w) as checkpoint:
        for step in (4, 5):  # of a program that has not restored anything
            with pytest.raises(ValueError, match=rf"save\({step}\), but .* holds step 5.*restore_latest\(\) before training"):
                checkpoint.save(step)
        assert checkpoint.restore_latest() == 5 and float(w) == 1.0
        checkpoint.save(5)
        with pytest.raises(ValueError, match="holds step 5"):
            checkpoint.save(4)
        w.assign(2.0)
        checkpoint.save(6)
    assert restore(tmp_path, w=w) == 6 and float(w) == 2.0


def test_strays_are_ignored_with_a_line_and_nothing_is_written_through_them(tmp_path: Path, caplog) -> None:
    directory, outside = tmp_path / "ckpt", tmp_path / "outside"
    w = mr.Variable(3.0)
    save(directory, 2, w=w)
    shutil.copytree(directory / "2", outside)
    (directory / "3").mkdir()
    (directory / "9").symlink_to(outside)
    (directory / "8").write_text("a file")
    (directory / "07").mkdir()
    (directory / ".saving-4-99").mkdir()
    (directory / "notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in files_of(outside)}
    assert restore(directory, w=w.assign(0.0)) == 2 and float(w) == 3.0
    for text in ("3 is an empty directory", "9 is a symbolic link", "8 is not a directory", "07 is not", "cut short", "notes.t"):
        assert any(text in r.message and r.levelname == "WARNING" for r in caplog.records), text
    with Checkpoint(directory, w=w, max_failed_saves=9) as checkpoint:
        assert checkpoint.steps() == [2]
        checkpoint.save(3)  # takes the place of the empty directory
        assert checkpoint.wait() == 3
        checkpoint.save(8)
        assert checkpoint.wait() == 3 and "saving step 8" in caplog.text and "Not a directory" in caplog.text
        checkpoint.save(9)
        assert checkpoint.wait() == 3 and "saving step 9" in caplog.text
        checkpoint.save(10)
    assert {p: p.read_bytes() for p in files_of(outside)} == before
    assert (directory / "notes.txt").read_text() == "mine" and not (directory / ".saving-4-99").exists()


def test_what_nfs_leaves_of_a_removed_file_that_was_open_is_no_damage(tmp_path: Path, monkeypatch) -> None:
    w = mr.Variable(3.0)
    save(tmp_path, 2, w=w)
    left = tmp_path / "2" / ".nfs000000000004"
    left.write_text("of somebody who read it")
    assert restore(tmp_path, w=w.assign(0.0)) == 2 and float(w) == 3.0
    scandir = os.scandir

    def listed(path: Path) -> contextlib.AbstractContextManager[list[os.DirEntry[str]]]:
        with scandir(path) as entries:
            found = list(entries)
        left.unlink(missing_ok=True)  # its reader has closed it
        return contextlib.nullcontext(found)

    with monkeypatch.context() as patched:
        patched.setattr(checksums.os, "scandir", listed)
        assert not checksums.file_checksums(tmp_path / "2")[1] and not left.exists()
    (tmp_path / "2" / "other").write_text("of nobody")
    with pytest.raises(CheckpointError, match="file other does not belong there"):
        restore(tmp_path, w=w)


def test_a_mark_is_seen_where_it_is_and_does_not_stay(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(_files, "_SEEN_SECONDS", 0.3)
    files = _files.StepFiles(tmp_path / "new")
    elsewhere = _files.StepFiles(tmp_path / "other")
    with pytest.raises(KeyError), files.mark() as mark:
        assert files.sees(mark) and not elsewhere.sees(mark) and files.look() == ([], [])
        raise KeyError
    assert not list(files.root.iterdir()) and not elsewhere.root.exists()
    old, young = files.root / ".shared-0", files.root / ".shared-1"  # of programs that were killed, and of one that may run
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    with files.mark():
        assert young.exists() and not old.exists() and files.look() == ([], [])
    (tmp_path / "file").touch()
    with _files.StepFiles(tmp_path / "file" / "new").mark() as mark:
        assert mark is None and "cannot be found out" in caplog.text


def test_a_mark_that_comes_late_is_seen(tmp_path: Path) -> None:
    files = _files.StepFiles(tmp_path / "new")
    slow = threading.Timer(0.3, lambda: (files.root.mkdir(), (files.root / "mark").touch()))
    slow.start()
    assert files.sees("mark")
    slow.join()


def test_a_program_that_changes_its_directory_saves_where_it_began(tmp_path: Path, monkeypatch) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Checkpoint("ckpt", w=mr.Variable(0.0)) as checkpoint:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoint.save(1)
    assert (tmp_path / "here" / "ckpt" / "1").is_dir() and not list((tmp_path / "elsewhere").iterdir())


def test_a_renamed_step_is_not_taken_for_another(tmp_path: Path, caplog) -> None:
    w = mr.Variable(1.0)
    save(tmp_path, 2, w=w)
    shutil.copytree(tmp_path / "2", tmp_path / "7")
    assert restore(tmp_path, w=w) == 2
    assert "step 7" in caplog.text and "is that of step 2" in caplog.text


@pytest.mark.parametrize("name", ["../evil", "/abs", ".hidden", "", "a/b", "a\0b", "x" * 129, "ü", "a b", ".."])
def test_names_that_could_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="will not do; expected 1 to 128"):
        Checkpoint(tmp_path, **{name: mr.Variable(0.0)})


def test_good_names_and_the_words_of_the_signature(tmp_path: Path) -> None:
    named = {name: mr.Variable(1.0) for name in ("a.b-c_D9", "x" * 128, "directory", "self", "9")}
    save(tmp_path, 1, **named)
    assert restore(tmp_path, **named) == 1


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({}, TypeError, "got nothing to save"),
        ({"epoch": 3}, TypeError, r"epoch is 3, and a restored value could not be put in its place.*state=\{'epoch': 0\}"),
        ({"x": (jnp.zeros(2), {"a": 1})}, TypeError, r"x\[0\] is .*could not be put in its place"),
        ({"x": "text"}, TypeError, "x is 'text' of type str; expected variables"),
        ({"x": {"s": on(1).distribute_dataset([np.arange(2)]).__iter__().get_state()}}, TypeError, r"policy.*iterator itself"),
        ({"x": {"f": print}}, TypeError, r"x\['f'\] is .* of type builtin_function"),
        ({"x": {"o": np.array([None])}}, TypeError, r"x\['o'\]"),
        ({"x": {"d": np.array(["2026-01-01"], "M8[s]")}}, TypeError, r"x\['d'\]"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path, named, error, message: str) -> None:
    with pytest.raises(error, match=message):
        Checkpoint(tmp_path / "new", **named)
    assert not (tmp_path / "new").exists()


def test_per_replica_values_are_refused(tmp_path: Path, strategy2: mr.Strategy, per_replica) -> None:
    with pytest.raises(TypeError, match=r"x\['a'\] is a PerReplica.*strategy.reduce.*on_read"):
        Checkpoint(tmp_path, x={"a": per_replica(strategy2, 1.0, 2.0)})


def test_arguments_are_checked(tmp_path: Path) -> None:
    w = mr.Variable(0.0)
    (tmp_path / "file").write_text("")
    for name, value, error in [("to_keep", 0, ValueError), ("to_keep", True, TypeError), ("failed_saves", 0, ValueError)]:
        with pytest.raises(error, match="max_"):
            Checkpoint(tmp_path, w=w, **{f"max_{name}": value})
    for directory, error in [(3, TypeError), ("gs://bucket/x", ValueError), ("", TypeError), (tmp_path / "file", ValueError)]:
        with pytest.raises(error, match="directory"):
            Checkpoint(directory, w=w)
    with Checkpoint(tmp_path, w=w) as checkpoint:
        for step in (-1, 1.5, True, "3", None, 10**18):
            with pytest.raises(TypeError, match="expected an int of at least 0"):
                checkpoint.save(step)
        checkpoint.save(np.int64(3))
    assert checkpoint.steps() == [3]
    for call in (lambda: checkpoint.save(4), checkpoint.restore_latest, checkpoint.wait):
        with pytest.raises(ValueError, match=r"after close\(\)"):
            call()
    checkpoint.close()


def test_inside_a_step_it_is_refused(tmp_path: Path, strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        w = mr.Variable(0.0)
        with Checkpoint(tmp_path, w=w) as checkpoint:
            with pytest.raises(mr.ContextError, match="inside a step"):
                strategy2.run(lambda: checkpoint.save(1))
            with pytest.raises(mr.ContextError, match="inside a step"):
                jax.jit(lambda: checkpoint.restore_latest())()
    assert checkpoint.steps() == []


# -- what does not fit


def test_all_differences_are_listed_before_anything_changes(tmp_path: Path) -> None:
    strategy = on(2)
    with strategy.scope():
        old = {"a": mr.Variable(1.0), "b": mr.Variable([1.0, 2.0]), "c": mr.Variable(1), "d": 3, "gone": mr.Variable(0.0)}
        key = {"k": jax.random.key(0)}
        iterator = iter(strategy.distribute_dataset([np.arange(2)]))
        save(tmp_path, 1, state=old, key=key, data=iterator)
        new = {"a": mr.Variable(7.0), "b": mr.Variable([7.0, 7.0, 7.0]), "c": mr.Variable(7.0), "d": np.zeros(2), "new": 5}
        with pytest.raises(CheckpointError) as caught:
            restore(tmp_path, state=new, key={"k": jax.random.key(0, impl="rbg")}, data=mr.Variable(0.0))
    lines = str(caught.value).splitlines()
    assert "nothing has changed" in lines[0] and "Give it the same objects" in lines[-3]
    assert "...without the iterator...).restore_latest(partial=True)" in lines[-1], "of which some are in the checkpoint only"
    assert [line.split(" is ")[0].split(" (")[0].strip() for line in lines[1:-3]] == [
        "data", "key['k']", "state['b']", "state['c']", "state['d']", "state['gone']", "state['new']",
    ]  # fmt: skip
    assert "state['b'] is mirrored float32[3] here, and mirrored float32[2] in the checkpoint" in str(caught.value)
    assert [float(new["a"]), new["c"].numpy().item(), new["new"]] == [7.0, 7.0, 5]
    iterator.close()


class Refusing:
    """An iterator that does not take any position."""

    def get_state(self) -> dict[str, int]:
        return {"at": 1}

    def set_state(self, state: dict[str, int]) -> None:
        raise ValueError(f"not {state}")


def test_an_iterator_that_refuses_its_position_leaves_all_as_it_was(tmp_path: Path, strategy2: mr.Strategy) -> None:
    rows = strategy2.make_numpy_dataset(np.arange(8)).batch(2)
    with strategy2.scope():
        w, dataset = mr.Variable(1.0), strategy2.distribute_dataset(rows)
        with iter(dataset) as iterator:
            next(iterator)
            save(tmp_path, 1, w=w, data=iterator, other=Refusing())
        w.assign(2.0)
        with iter(dataset) as iterator:
            next(iterator), next(iterator), next(iterator)
            message = r"(?s)an iterator does not take its position: ValueError: not {'at': 1}.*its beginning:\n.*partial=True\)"
            with pytest.raises(CheckpointError, match=message):
                restore(tmp_path, w=w, data=iterator, other=Refusing())
            assert float(w) == 2.0
            assert [value.tolist() for value in next(iterator).values] == [[6], [7]]


def test_a_partial_restore_leaves_out_what_is_not_named_and_nothing_else(tmp_path: Path, strategy2: mr.Strategy, caplog) -> None:
    def partly(**named: object) -> int | None:
        with Checkpoint(tmp_path, **named) as checkpoint:
            return checkpoint.restore_latest(partial=True)

    with strategy2.scope():
        w, other = mr.Variable([1.0, 2.0]), mr.Variable(5.0)
        with iter(strategy2.distribute_dataset([np.arange(2)] * 3)) as iterator:
            for step in (1, 2):
                save(tmp_path, step, w=w.assign_add([1.0, 1.0]), other=other, state={"epoch": step, "batches": iterator})
    w, state = mr.Variable([0.0, 0.0]), {"epoch": 0}
    with pytest.raises(CheckpointError, match=r"(?s)\['batches'\] \(iterator\) is in the checkpoint, and not .*partial=True\)"):
        restore(tmp_path, w=w, state=state)
    for named, problem in [
        ({"w": w, "extra": mr.Variable(0.0)}, r"extra \(mirrored float32\[\]\) is not in the checkpoint"),
        ({"w": w, "other": mr.Variable([0.0])}, r"other is mirrored float32\[1\] here, and mirrored float32\[\] in"),
    ]:
        with pytest.raises(CheckpointError, match=problem) as caught:
            partly(**named)
        assert "partial=True" not in str(caught.value), "which would not help"
    assert w.numpy().tolist() == [0.0, 0.0] and state == {"epoch": 0}
    assert partly(w=w, state=state) == 2 and w.numpy().tolist() == [3.0, 4.0] and state == {"epoch": 2}
    data = max(files_of(tmp_path / "2" / "arrays"), key=lambda path: path.stat().st_size)
    flip(data, 4 * data.stat().st_size)
    assert partly(state=state) == 1 and state == {"epoch": 1} and "step 2" in caplog.text, "though the arrays are not wanted"
    with strategy2.scope(), iter(strategy2.distribute_dataset([np.arange(2)] * 3)) as iterator:
        save(tmp_path, 3, w=w, data=iterator)  # training that goes on without the old position
        assert restore(tmp_path, w=w, data=iterator) == 3


def test_workers_that_read_two_different_steps_of_one_number_restore_neither(tmp_path: Path, monkeypatch) -> None:
    w = mr.Variable(1.0)
    save(tmp_path, 3, w=w)
    w.assign(5.0)
    with Checkpoint(tmp_path, w=w) as checkpoint, monkeypatch.context() as patch:
        another = {"id": ["2020-02-02T00:00:00Z", "00000000"]}
        patch.setattr(checkpoint, "_exchange", lambda value, where: [value, {**value, **(another if "id" in value else {})}])
        with pytest.raises(CheckpointError, match=r"\(worker 0\) holds a step 3 of .*\(worker 1\) holds a step 3 of 2020-02-02"):
            checkpoint.restore_latest()
    assert float(w) == 5.0


def test_a_checkpoint_of_a_later_format_is_not_taken_for_damage(tmp_path: Path, monkeypatch) -> None:
    w = mr.Variable(1.0)
    monkeypatch.setattr(_files, "FORMAT", 2)
    save(tmp_path, 1, w=w)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 2, and this version.*written by.*install that version"):
        restore(tmp_path, w=w)


def test_copies_that_differ_are_never_saved(tmp_path: Path, strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        w, other = mr.Variable(np.zeros(3, np.float32), name="w"), mr.Variable(0.0, name="other")
        with Checkpoint(tmp_path, w=w) as checkpoint:
            shards = [jax.device_put(np.array([0, 0, i], np.float32), device) for i, device in enumerate(strategy2.devices)]
            good = w._array
            w._array = jax.make_array_from_single_device_arrays((3,), w._array.sharding, shards)
            with pytest.raises(mr.ReplicasDivergeError, match="copies of variable 'w' differ"):
                checkpoint.save(1)
            assert checkpoint.wait() is None
            w._array = good
            checkpoint.save(1)
            assert checkpoint.wait() == 1
            scalars = [jax.device_put(np.float32(i), device) for i, device in enumerate(strategy2.devices)]
            other._array = jax.make_array_from_single_device_arrays((), other._array.sharding, scalars)
            checkpoint.save(2)  # which does not hold `other`


# -- damage


def trained(directory: Path, steps: int = 2) -> dict[str, object]:
    """Save some steps with data that compression cannot shorten, and return what was saved."""
    noise = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    named = {"w": mr.Variable(noise), "state": {"b": mr.Variable(np.arange(9)), "epoch": 5, "z": np.zeros(7)}}
    with Checkpoint(directory, **named) as checkpoint:
        for step in range(1, steps + 1):
            named["w"].assign(noise * step)
            checkpoint.save(step)
    return named


def flips(directory: Path, count: int, caplog) -> None:
    named, rng = trained(directory), random.Random(count)
    newest = named["w"].numpy()
    originals = {path: path.read_bytes() for path in files_of(directory / "2") if path.stat().st_size}
    paths = list(originals)
    weights = [len(data) for data in originals.values()]
    for i in range(count):
        # Half of them anywhere in the bytes, half in any file, so that the small files get their share.
        path = rng.choices(paths, weights)[0] if i % 2 else rng.choice(paths)
        flip(path, rng.randrange(8 * len(originals[path])))
        caplog.clear()
        with Checkpoint(directory, **named) as checkpoint:
            found = checkpoint.restore_latest()
        path.write_bytes(originals[path])
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR" and r.name == "mirrored"]
        if found == 2:
            assert path.name == "record.json" and named["w"].numpy().tobytes() == newest.tobytes()
        else:
            assert found == 1 and len(errors) == 1 and "step 2" in errors[0] and path.name in errors[0], (path, errors)
            assert named["w"].numpy().tobytes() == (newest / 2).tobytes()


def test_flipped_bits_are_found_and_the_step_before_is_used(tmp_path: Path, caplog) -> None:
    flips(tmp_path, 40, caplog)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_saves_lose_nothing_that_was_committed() -> None:
    script = Path(__file__).parents[1] / "chaos_saves.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([sys.executable, script, "20"], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_flipped_bits_are_found(tmp_path: Path, caplog) -> None:
    flips(tmp_path, 1000, caplog)


def test_damaged_data_names_the_file_and_the_array(tmp_path: Path, caplog) -> None:
    named = trained(tmp_path)
    largest = max(files_of(tmp_path / "2"), key=lambda p: p.stat().st_size)
    flip(largest, 8 * (largest.stat().st_size // 2))
    assert restore(tmp_path, **named) == 1
    message = next(r.getMessage() for r in caplog.records if r.levelname == "ERROR" and r.name == "mirrored")
    assert f"step 2 in {tmp_path} is damaged and is not used" in message
    assert f"file {largest.relative_to(tmp_path / '2')} is damaged: its CRC-32" in message
    assert "array w is damaged" in message or "orbax cannot read the arrays" in message


@pytest.mark.parametrize(
    "harm", ["truncate", "empty", "remove", "extra", "link", "no_record", "folder_for_record", "socket_for_record", "no_arrays"]
)
def test_other_damage_is_found(tmp_path: Path, harm: str, caplog) -> None:
    named, step = trained(tmp_path), tmp_path / "2"
    victim = max(files_of(step / "arrays"), key=lambda p: p.stat().st_size)
    match harm:
        case "truncate":
            os.truncate(victim, victim.stat().st_size - 1)
        case "empty":
            os.truncate(victim, 0)
        case "remove":
            victim.unlink()
        case "extra":
            victim = step / "arrays" / "zz"
            victim.write_text("")
        case "link":
            moved = victim.rename(tmp_path / "moved")
            victim.symlink_to(moved)
        case "no_record":
            victim = step / "record.json"
            victim.unlink()
        case "folder_for_record":
            victim = step / "record.json"
            victim.unlink()
            victim.mkdir()
        case "socket_for_record":
            victim = step / "record.json"
            victim.unlink()
            os.mknod(victim, stat.S_IFSOCK | 0o600)
        case "no_arrays":
            shutil.rmtree(step / "arrays")
    assert restore(tmp_path, **named) == 1
    assert sum(r.levelname == "ERROR" and victim.name in r.getMessage() for r in caplog.records if r.name == "mirrored") == 1


def refuse(patch: pytest.MonkeyPatch, owner: object, name: str, refused: str, error: Exception) -> None:
    """Let a function raise an error for each path whose name is `refused`."""
    real = getattr(owner, name)

    def refusing(path: str | os.PathLike[str] = ".", *more: object, **named: object) -> object:
        if os.path.basename(path) == refused:
            raise error
        return real(path, *more, **named)

    patch.setattr(owner, name, refusing)


#: What fails, for what path in a step, with what, and what of the path is in the message.
UNREAD = {
    "open the record": (os, "open", "record.json", OSError(errno.EMFILE, "too many"), "2/record.json"),
    "read the record": (checksums, "decode_record", "", OSError(errno.EIO, "input/output"), "2/record.json"),
    "list the folder": (os, "scandir", "arrays", OSError(errno.EACCES, "denied", "2/arrays"), "2/arrays"),
    "read a file": (checksums, "_file_checksum", "_METADATA", OSError(errno.ESTALE, "stale"), "2/arrays/_METADATA"),
    "read the arrays": (_files, "_read_arrays", "arrays", OSError(errno.ENFILE, "too many"), "2/arrays"),
    "have the memory": (_files, "_read_arrays", "arrays", MemoryError("no memory"), "2/arrays"),
}


@pytest.mark.parametrize("what", UNREAD)
def test_what_could_not_be_read_is_no_damage(tmp_path: Path, what: str, monkeypatch, caplog) -> None:
    owner, name, refused, error, shown = UNREAD[what]
    named = trained(tmp_path)
    named["w"].assign(np.zeros((40, 50), np.float32))
    before = {path: path.read_bytes() for path in files_of(tmp_path)}
    with Checkpoint(tmp_path, max_to_keep=2, **named) as checkpoint:
        with monkeypatch.context() as patch:
            if name == "decode_record":  # as from `file.read()`, which names no file
                patch.setattr(owner, name, lambda data: (_ for _ in ()).throw(error))
            else:
                refuse(patch, owner, name, refused, error)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.restore_latest()
        text = str(caught.value)
        assert str(error).partition(":")[0] in text and shown in text and "nothing was restored or removed" in text
        assert f"mv {tmp_path}/2 {tmp_path}/unread-2" in text and "damaged" not in text + caplog.text
        assert {path: path.read_bytes() for path in files_of(tmp_path)} == before and not named["w"].numpy().any()
        assert checkpoint.restore_latest() == 2 and named["w"].numpy().any(), "and it can be run again"
        checkpoint.save(3)
    assert checkpoint.steps() == [2, 3]
    (tmp_path / "3").rename(tmp_path / "unread-3")  # the way to go on that the message names
    assert restore(tmp_path, **named) == 2


def test_a_step_that_another_process_removes_while_it_is_read_says_so(tmp_path: Path, monkeypatch) -> None:
    named = trained(tmp_path)

    def removed(*_: object) -> None:
        shutil.rmtree(tmp_path / "2")
        raise FileNotFoundError("no such file")

    monkeypatch.setattr(_files, "_read_arrays", removed)
    with pytest.raises(CheckpointError, match=r"step 2 was removed while it was read, by another process .*max_to_keep"):
        restore(tmp_path, **named)


def test_a_step_that_another_process_removes_while_it_is_listed_is_none(tmp_path: Path, monkeypatch, caplog) -> None:
    trained(tmp_path)
    listdir = os.listdir

    def removed(path: str = ".") -> list[str]:
        if os.path.basename(path) == "1":
            shutil.rmtree(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", removed)
    assert _files.StepFiles(tmp_path).look() == ([2], [])


def test_a_damaged_step_is_damaged_also_where_not_all_of_it_can_be_read(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path)
    flip(tmp_path / "2" / "arrays" / "_METADATA", 9)
    other = max(files_of(tmp_path / "2"), key=lambda p: p.stat().st_size)
    checksum = checksums._file_checksum

    def of_a_bad_disk(path: Path) -> list[int]:
        if path == other:
            raise OSError(errno.EIO, "Input/output error")
        return checksum(path)

    monkeypatch.setattr(checksums, "_file_checksum", of_a_bad_disk)
    assert restore(tmp_path, **named) == 1
    assert "file arrays/_METADATA is damaged" in caplog.text and "missing" not in caplog.text


@pytest.mark.parametrize("here", ["whole", "damaged", "unread", "unlisted"])
def test_no_step_is_passed_over_where_one_worker_could_not_read_it(tmp_path: Path, here: str, monkeypatch) -> None:
    named = trained(tmp_path)
    with Checkpoint(tmp_path, **named) as checkpoint, monkeypatch.context() as patch:
        told: list[dict[str, object]] = []

        def exchange(value: dict[str, object], where: str) -> list[dict[str, object]]:
            told.append(value)
            return [value, {**value, "error": "of worker 1"} if "problems" in value and here in ("whole", "damaged") else value]

        patch.setattr(checkpoint, "_exchange", exchange)
        if here == "damaged":
            flip(tmp_path / "2" / "arrays" / "_METADATA", 9)
        elif here == "unread":
            refuse(patch, os, "open", "record.json", OSError(errno.EIO, "Input/output error"))
        elif here == "unlisted":
            refuse(patch, os, "listdir", "2", PermissionError(errno.EACCES, "Permission denied"))
        worker = 0 if here.startswith("un") else 1
        with pytest.raises(CheckpointError, match=f"failed on worker {worker}, and nothing was done"):
            checkpoint.restore_latest()
        assert len(told) == (1 if here == "unlisted" else 2), "the others have been told"
    assert checkpoint.steps() == [1, 2]


def test_a_step_that_cannot_be_read_back_while_it_is_written_does_not_count(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path)
    with Checkpoint(tmp_path, **named) as checkpoint:
        for name, refused in (("scandir", "d"), ("_file_checksum", "_METADATA")):
            with monkeypatch.context() as patch:
                owner = os if name == "scandir" else checksums
                refuse(patch, owner, name, refused, OSError(errno.EMFILE, "Too many open files"))
                checkpoint.save(3)
                assert checkpoint.wait() == 2 and "saving step 3" in caplog.text
                caplog.clear()
        checkpoint.save(4)
    assert restore(tmp_path, **named) == 4


def test_a_record_that_is_no_record_is_damage(tmp_path: Path) -> None:
    named = trained(tmp_path, steps=1)
    record = tmp_path / "1" / "record.json"
    good = record.read_bytes()
    changed = json.loads(good)
    changed["record"]["step"] = 2
    for data in (b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100000, json.dumps(changed).encode(), good[:-3]):
        record.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"no step in .* is undamaged:\n  step 1: file record.json cannot be used"):
            restore(tmp_path, **named)
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(CheckpointError, match="not a file of at most"):
        restore(tmp_path, **named)


def test_a_record_that_is_a_link_or_too_large_is_damage(tmp_path: Path, monkeypatch) -> None:
    named = trained(tmp_path, steps=1)
    record = tmp_path / "1" / "record.json"
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "MAX_RECORD_BYTES", record.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="not a file of at most"):
            restore(tmp_path, **named)
    assert restore(tmp_path, **named) == 1
    record.symlink_to(record.rename(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointError, match=r"step 1: file record.json cannot be used: .*symbolic link"):
        restore(tmp_path, **named)


def test_a_step_survives_a_power_failure_before_it_counts(tmp_path: Path, monkeypatch) -> None:
    done: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")))), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append(("rename", Path(new))), rename(old, new))[1])
    save(tmp_path, 4, w=mr.Variable(1.0))
    monkeypatch.undo()
    step = tmp_path / "4"
    named = done.index(("rename", step))
    assert done[named + 1 :] == [("sync", tmp_path)], "the name"
    [new] = {path.parent for what, path in done if path.name == "record.json"}
    synced = {new / path.relative_to(step) for path in (step, *step.rglob("*")) if path.is_dir()}
    assert synced | {new / "record.json"} <= {path for what, path in done[:named] if what == "sync"}


def test_wrong_arrays_in_whole_files_are_found(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path)
    storable = _files._storable
    monkeypatch.setattr(_files, "_storable", lambda a: storable(a + 1 if a.shape == (40, 50) else a))
    save(tmp_path, 3, **named)
    monkeypatch.undo()
    assert restore(tmp_path, **named) == 2
    assert "step 3" in caplog.text and "array w is damaged: its CRC-32 is not the one that was written" in caplog.text


def test_when_no_step_is_good_all_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    named = trained(tmp_path, steps=3)
    for step in (1, 2, 3):
        flip(tmp_path / str(step) / "arrays" / "_METADATA", 9)
    named["w"].assign(np.zeros((40, 50), np.float32))
    with pytest.raises(CheckpointError, match=r"(?s)no step in .* is undamaged:\n  step 3: .*\n  step 2: .*\n  step 1: .*_META"):
        restore(tmp_path, **named)
    assert not named["w"].numpy().any()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]


def test_damaged_steps_make_room_for_new_ones(tmp_path: Path) -> None:
    w = mr.Variable(0.0)
    with Checkpoint(tmp_path, max_to_keep=2, w=w) as checkpoint:
        for step in (10, 20, 30):
            w.assign(float(step))
            checkpoint.save(step)
    assert checkpoint.steps() == [20, 30]
    flip(tmp_path / "30" / "record.json", 50)
    with Checkpoint(tmp_path, max_to_keep=2, w=w) as checkpoint:
        assert checkpoint.restore_latest() == 20 and float(w) == 20.0
        assert checkpoint.steps() == [20, 30], "nothing goes before something newer is there"
        checkpoint.save(25)
        checkpoint.wait()
        assert checkpoint.steps() == [20, 25]
    flip(tmp_path / "25" / "record.json", 50)
    with Checkpoint(tmp_path, max_to_keep=2, w=w) as checkpoint:
        assert checkpoint.restore_latest() == 20
        w.assign(2525.0)
        checkpoint.save(25)
        checkpoint.wait()
        assert checkpoint.steps() == [20, 25]
    assert restore(tmp_path, w=w) == 25 and float(w) == 2525.0


# -- writes that fail


def test_failed_saves_are_logged_and_too_many_end_training(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    w = mr.Variable(1.0)
    with Checkpoint(tmp_path, max_failed_saves=2, w=w) as checkpoint:
        checkpoint.save(1)
        assert checkpoint.wait() == 1
        monkeypatch.setattr(_files, "_write_synced", full)
        checkpoint.save(2)
        assert checkpoint.wait() == 1
        error = next(r.getMessage() for r in caplog.records if r.levelname == "ERROR")
        assert "saving step 2" in error and "No space left on device" in error and "the last step there is 1" in error
        monkeypatch.undo()
        checkpoint.save(3)
        assert checkpoint.wait() == 3
        monkeypatch.setattr(_files, "_write_synced", full)
        checkpoint.save(4)
        checkpoint.save(5)
        with pytest.raises(CheckpointError, match=r"failed 2 times in a row: step 4: OSError.*; step 5: .*last step there is 3"):
            checkpoint.save(6)
        monkeypatch.undo()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["1", "3"]


def test_a_last_save_that_failed_is_an_error_at_the_end(tmp_path: Path, monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(_files, "_write_synced", broken)
    with pytest.raises(CheckpointError, match=r"no later save has made up for it.*Input/output error"):
        save(tmp_path, 1, w=mr.Variable(0.0))
    with pytest.raises(KeyError, match="mine"), Checkpoint(tmp_path, w=mr.Variable(0.0)) as checkpoint:
        checkpoint.save(1)
        raise KeyError("mine")


@pytest.fixture
def tiny_disk(tmp_path: Path):
    directory = tmp_path / "tiny"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_a_full_disk_costs_saves_and_not_training(tiny_disk: Path, caplog) -> None:
    rng = np.random.default_rng(0)
    w = mr.Variable(rng.standard_normal(200_000).astype(np.float32))  # 0.8 MB that do not compress
    with Checkpoint(tiny_disk, w=w) as checkpoint:
        checkpoint.save(1)
        assert checkpoint.wait() == 1
        filler = tiny_disk / "filler"
        filler.write_bytes(rng.bytes(os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_bsize - 300_000))
        for step in (2, 3):
            checkpoint.save(step)
            assert checkpoint.wait() == 1
        errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR" and r.name == "mirrored"]
        assert len(errors) == 2 and all("space" in error for error in errors), errors
        assert checkpoint.restore_latest() == 1
        assert sorted(p.name for p in tiny_disk.iterdir()) == ["1", "filler"]
        filler.unlink()
        w.assign(w * 2)
        checkpoint.save(4)
        assert checkpoint.wait() == 4
        filler.write_bytes(rng.bytes(os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_bsize - 300_000))
        for step in (5, 6, 7):
            checkpoint.save(step)
        with pytest.raises(CheckpointError, match="failed 3 times in a row"):
            checkpoint.wait()
        filler.unlink()
    assert restore(tiny_disk, w=w) == 4


# -- around it


def test_the_launcher_is_told_of_each_commit(tmp_path: Path, monkeypatch, caplog) -> None:
    def told() -> list[tuple[str, str]]:
        return sorted((path.name, path.read_text()) for path in tmp_path.iterdir() if "progress" in path.name)

    monkeypatch.setenv("MIRRORED_PROGRESS_FILE", str(tmp_path / "progress"))
    with Checkpoint(tmp_path / "ckpt", w=mr.Variable(0.0)) as checkpoint:
        assert told() == []
        checkpoint.save(12)
        checkpoint.wait()
        [(name, text)] = told()
        assert re.fullmatch("progress-[0-9a-f]{8}", name) and text == "12"
        (tmp_path / name).unlink()
        assert checkpoint.restore_latest() == 12 and told() == [(name, "12")], "the launchers of other hosts hear of it so"
        with Checkpoint(tmp_path / "best", w=mr.Variable(0.0)) as best:
            best.save(3)
        assert sorted(text for _, text in told()) == ["12", "3"]
        monkeypatch.setenv("MIRRORED_PROGRESS_FILE", str(tmp_path / "missing" / "progress"))
        checkpoint.save(13)
        assert checkpoint.wait() == 13
    assert "could not be written" in caplog.text


def test_the_launcher_of_another_worker_is_told_too(tmp_path: Path, monkeypatch) -> None:
    """On several hosts each launcher counts its own restarts without a new checkpoint."""
    monkeypatch.setenv("MIRRORED_PROGRESS_FILE", str(tmp_path / "progress"))
    target = tmp_path / f"progress-{zlib.crc32(os.fsencode(tmp_path)):08x}"
    writer = Writer(_files.StepFiles(tmp_path), None, 3)
    writer.learn(None, ["step 1: OSError"])
    assert (writer.latest, writer.failures) == (None, ["step 1: OSError"]) and not target.exists()
    writer.learn(7, [])
    assert (writer.latest, writer.failures, target.read_text()) == (7, [], "7")
    os.link(target, tmp_path / "what a reader has open")
    writer.learn(9, [])
    assert target.read_text() == "9" and (tmp_path / "what a reader has open").read_text() == "7", "it is never half written"
    target.unlink()
    writer.learn(9, ["step 10: OSError"])
    assert writer.failures == ["step 10: OSError"] and not target.exists()


def test_what_is_not_a_step_of_ours_is_left_alone(tmp_path: Path, caplog) -> None:
    """Such as the directories of other checkpoints, one for each fold of the data."""
    for fold in "01":
        save(tmp_path / fold, 7, w=mr.Variable(float(fold)))
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "notes.txt").write_text("mine")
    with Checkpoint(tmp_path, max_to_keep=1, w=mr.Variable(9.0)) as checkpoint:
        assert checkpoint.steps() == [] and checkpoint.restore_latest() is None
        for step in (10, 20):
            checkpoint.save(step)
    assert "2 was not written by mr.Checkpoint" in caplog.text
    assert (tmp_path / "2" / "notes.txt").read_text() == "mine"
    w = mr.Variable(5.0)
    assert restore(tmp_path / "1", w=w) == 7 and float(w) == 1.0
    caplog.clear()
    with Checkpoint(tmp_path / "3", max_failed_saves=2, w=w) as checkpoint:
        (tmp_path / "3" / "1").mkdir(parents=True)
        (tmp_path / "3" / "1" / "notes.txt").write_text("mine")
        checkpoint.save(1)
        assert checkpoint.wait() is None and "saving step 1 to" in caplog.text
        checkpoint.save(2)
    assert (tmp_path / "3" / "1" / "notes.txt").read_text() == "mine"


def test_two_checkpoints_in_one_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Such as a cell of a notebook that is run twice."""
    pair = [Checkpoint(tmp_path, max_to_keep=None, w=mr.Variable(0.0)) for _ in range(2)]
    for step in range(0, 20, 2):
        for number, checkpoint in enumerate(pair):
            checkpoint._writer.start(step + number, snapshot_of(checkpoint), {"num_replicas": 1, "num_workers": 1})
        for checkpoint in pair:
            checkpoint._writer.finish()
            assert checkpoint._writer.failures == []
    assert pair[0].steps() == list(range(20))
    for checkpoint in pair:
        checkpoint.close()


def snapshot_of(checkpoint: Checkpoint) -> _state.Snapshot:
    leaves = checkpoint._leaves()
    snapshot = _state.take_snapshot(leaves, [_state.positions_of(leaves)], is_kept=True)
    assert snapshot is not None
    return snapshot


def test_workers_that_call_different_methods_are_told_which() -> None:
    same_on_workers.require_same_call(["save", "save"])
    with pytest.raises(CheckpointError, match=r"different methods of a checkpoint: worker 0 wait, worker 1 save\. All must"):
        same_on_workers.require_same_call(["wait", "save"])


def test_what_other_workers_say_is_escaped_and_cut() -> None:
    evil = "first\x1b[2J" + "x" * 300_000 + "\nCRITICAL all is well\x07"
    with pytest.raises(CheckpointError) as caught:
        same_on_workers.require_no_error([{"error": evil}, {}], "save")
    text = str(caught.value)
    assert "first\\x1b[2J" in text and "\n  | CRITICAL all is well\\x07" in text and len(text) < 10_000
    for sentence in (
        lambda: same_on_workers.require_seen([{"where": "here", "sees": True}, {"where": evil, "sees": False}]),
        lambda: same_on_workers.require_shared([{"where": "a", "x": 1}, {"where": evil, "x": 2}], "x", str),
    ):
        with pytest.raises(CheckpointError) as caught:
            sentence()
        assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 10_000
    assert "\x1b" not in same_on_workers.by_first_worker([[], [evil]])[0]


def test_the_record_is_json_that_says_what_is_there(tmp_path: Path) -> None:
    strategy = on(2)
    with strategy.scope(), iter(strategy.distribute_dataset([np.arange(4)] * 3)) as iterator:
        next(iterator)
        save(tmp_path, 3, w=mr.Variable(1.0), data=iterator)
    record = checksums.decode_record((tmp_path / "3" / "record.json").read_bytes())
    assert (record["format"], record["step"], record["num_replicas"], record["num_workers"]) == (1, 3, 2, 1)
    assert record["versions"]["jax"] == jax.__version__ and record["leaves"]["data"]["by_worker"][0]["version"] == 1
    assert record["leaves"]["w"]["kind"] == "mirrored"


def test_without_orbax_the_error_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[checkpoint\]'"):
        Checkpoint(tmp_path, w=mr.Variable(0.0))


@pytest.mark.skipif((3, 12, 0) <= sys.version_info[:3] <= (3, 12, 1), reason="this Python starts no threads at a program's end")
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        pytest.param("raise ValueError('the end')", 1, marks=pytest.mark.slow),
        pytest.param("sys.exit(7)", 7, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_ends_without_waiting_loses_nothing(tmp_path: Path, end: str, code: int) -> None:
    done = run_slowly_saved(tmp_path, f"checkpoint.save(1)\n{end}")
    assert done.returncode == code and "lost" not in done.stderr and ("Error" in done.stderr) == (code == 1), done.stderr
    assert restore(tmp_path, w=mr.Variable(np.zeros(100, np.float32))) == 1


@pytest.mark.slow
def test_a_save_that_begins_after_the_program_has_ended_is_lost_and_says_so(tmp_path: Path) -> None:
    late = "threading.Thread(target=lambda: [time.sleep(1), checkpoint.save(2)]).start()"
    done = run_slowly_saved(tmp_path, f"checkpoint.save(1)\ncheckpoint.wait()\n{late}")
    assert "step 2 is lost: the program had ended before it was saved" in done.stderr, done.stderr
    assert "where the last step is 1. End the main thread with checkpoint.close(), after the last save." in done.stderr
    assert restore(tmp_path, w=mr.Variable(np.zeros(100, np.float32))) == 1


@pytest.mark.slow
def test_ctrl_c_while_the_program_waits_for_its_last_save_is_shown_and_so_is_the_loss(tmp_path: Path) -> None:
    done = run_slowly_saved(tmp_path, f"{INTERRUPT}checkpoint.save(1)")
    assert "KeyboardInterrupt" in done.stderr and "step 1 is lost: the program had ended" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_wait_that_was_interrupted_may_be_made_again(tmp_path: Path) -> None:
    wait = """
try:
    checkpoint.save(1)
    checkpoint.wait()
except KeyboardInterrupt:
    print(checkpoint.wait(), checkpoint.steps())
"""
    done = run_slowly_saved(tmp_path, INTERRUPT + wait)
    assert done.stdout == "1 [1]\n", done.stderr


def test_a_forked_child_ends_whatever_the_other_threads_held(tmp_path: Path) -> None:
    fork = """
from mirrored._workers.progress import progress
checkpoint.save(1)
progress.lock.acquire()
child = os.fork()
if not child:
    sys.exit(3)
progress.lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_slowly_saved(tmp_path, fork).stdout == "3\n"


#: Makes the thread that saves wait until the main thread waits for it, and interrupt that.
INTERRUPT = """
from mirrored._workers.progress import progress

def interrupt():
    while not any(phase.text == "waiting for the checkpoint" for phase in progress.phases):
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

_files.StepFiles.write = lambda *args: (interrupt(), time.sleep(0.5), write(*args))[2]
"""


def run_slowly_saved(directory: Path, rest: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose saves take half a second longer."""
    code = """
import os, signal, sys, threading, time
import numpy as np
import mirrored as mr
from mirrored._checkpoint import files as _files
w = mr.Variable(np.zeros(100, np.float32))
checkpoint = mr.Checkpoint(sys.argv[1], w=w)
write = _files.StepFiles.write
_files.StepFiles.write = lambda *args: (time.sleep(0.5), write(*args))[1]
"""
    return subprocess.run([sys.executable, "-c", code + rest, directory], capture_output=True, text=True, timeout=50)


def test_a_damaged_step_that_cannot_be_removed_still_does_not_count(tmp_path: Path, monkeypatch, caplog) -> None:
    w = mr.Variable(0.0)
    with Checkpoint(tmp_path, w=w) as checkpoint:
        checkpoint.save(1)
        checkpoint.save(9)
    flip(tmp_path / "9" / "record.json", 50)
    remove = _files.StepFiles.remove

    def refused(self, step: int) -> None:
        if step == 9:
            raise PermissionError(13, "Permission denied")
        remove(self, step)

    monkeypatch.setattr(_files.StepFiles, "remove", refused)
    with Checkpoint(tmp_path, w=w) as checkpoint:
        assert checkpoint.restore_latest() == 1
        checkpoint.save(2)
        assert checkpoint.wait() == 2 and "step 9" in caplog.text and "could not be removed" in caplog.text
        checkpoint.save(3)
        assert checkpoint.wait() == 3


RECIPE = re.search(
    r"```python\n(def train_epochs.*?)```", (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(), re.DOTALL
)[1]


KILLED = """
import json, os, signal, sys
import jax.numpy as jnp
import numpy as np
import mirrored as mr
strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
directory, kill_at = sys.argv[1], int(sys.argv[2])
class Killed(mr.Checkpoint):
    def save(self, step):
        super().save(step)
        if step == kill_at:
            self.wait()
            os.kill(os.getpid(), signal.SIGKILL)
mr.Checkpoint = Killed
say = lambda text: print(text, flush=True)
gather = strategy.gather
strategy.gather = lambda x, axis: (value := gather(x, axis=axis), say(json.dumps(value.tolist())))[0]
"""


def run_epochs(directory: Path, kill_at: int, recipe: str = RECIPE) -> tuple[list[str], list[str]]:
    """Train for three epochs, or up to a step; return the rows of each step, and what came out."""
    program = f"{KILLED}{recipe}\nprint('END', train_epochs(directory, 3)[1].hex())"
    command = [sys.executable, "-c", program, directory, str(kill_at)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50)
    assert done.returncode == (-9 if kill_at else 0), done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if "END" not in line], [line for line in lines if "END" in line]


@pytest.mark.parametrize("kills", [(5,), pytest.param((3, 4, 7, 9), marks=pytest.mark.slow)], ids=str)
def test_the_epochs_of_the_docs_go_on_bit_for_bit_after_kills(tmp_path: Path, kills: tuple[int, ...]) -> None:
    used, end = run_epochs(tmp_path / "whole", 0)
    parts = [run_epochs(tmp_path / "parts", kill_at) for kill_at in (*kills, 0)]
    assert [line for part, _ in parts for line in part] == used and len(set(used)) == 9 and parts[-1][1] == end


@pytest.mark.slow
def test_the_loop_that_the_docs_warn_of_does_not_go_on_so(tmp_path: Path) -> None:
    naive = RECIPE.replace('"batches": iter(dataset)', "").replace('in state["batches"]', "in dataset")
    naive = naive.replace('            state["batches"] = iter(dataset)\n', "")
    assert "batches" not in naive
    used, end = run_epochs(tmp_path / "whole", 0, naive)
    first, _ = run_epochs(tmp_path / "parts", 4, naive)
    assert first == used[:4] and run_epochs(tmp_path / "parts", 0, naive)[1] != end


def test_one_iterator_over_all_epochs_goes_on(tmp_path: Path, strategy2: mr.Strategy) -> None:
    rows = strategy2.make_numpy_dataset(np.arange(8)).shuffle(seed=0).batch(3).repeat(3)
    with iter(strategy2.distribute_dataset(rows)) as batches:
        whole = [strategy2.gather(x, axis=0).tolist() for x in batches]
    used: list[list[int]] = []
    for stop in (4, 7, 9):
        rows = strategy2.make_numpy_dataset(np.arange(8)).shuffle(seed=0).batch(3).repeat(3)  # as in a new process
        with iter(strategy2.distribute_dataset(rows)) as batches, Checkpoint(tmp_path, batches=batches) as checkpoint:
            first = checkpoint.restore_latest() or 0
            for step in range(first + 1, stop + 1):
                used.append(strategy2.gather(next(batches), axis=0).tolist())
                checkpoint.save(step)
    assert used == whole and sorted(itertools.chain(*whole[3:6])) == list(range(8)) and whole[0] != whole[3]


def test_nothing_there_restores_nothing(tmp_path: Path) -> None:
    w = mr.Variable(4.0)
    assert restore(tmp_path / "new", w=w) is None and float(w) == 4.0
    assert not (tmp_path / "new").exists()


def test_in_a_notebook_whose_event_loop_runs(tmp_path: Path) -> None:
    async def cell() -> float:
        w = mr.Variable(3.0)
        save(tmp_path, 1, w=w)
        w.assign(0.0)
        assert restore(tmp_path, w=w) == 1
        return float(w)

    assert asyncio.run(cell()) == 3.0


def test_state_without_any_array(tmp_path: Path) -> None:
    save(tmp_path, 1, state={"epoch": 3})
    state = {"epoch": 0}
    assert restore(tmp_path, state=state) == 1 and state == {"epoch": 3}
