"""Checkpoints: what is saved comes back exactly, and what cannot is said before anything changes."""

import contextlib
import errno
import json
import logging
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
import zipfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from pipelines import Reiterable
from processes import run_program
from strategies import strategy_of

import mirrored as mr
from mirrored._checkpoint import files as _files
from mirrored._checkpoint import same_on_workers
from mirrored._checkpoint import state as _state
from mirrored._checkpoint.checkpoint import Checkpoint
from mirrored._checkpoint.writer import Writer
from mirrored._errors import CheckpointError
from mirrored._jax import topologies
from mirrored._replicas import in_flight

pytestmark = pytest.mark.usefixtures("in_numpy")

Pair = namedtuple("Pair", "first second")


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


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "ERROR" and r.name == "mirrored"]


# -- what is saved comes back


@pytest.mark.slow
def test_values_of_every_dtype_come_back_exactly(tmp_path: Path) -> None:
    names = "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64 bfloat16 int4 uint4 float8_e4m3fn float8_e5m2"
    values = {name: np.array([[0, 1, 1]]).astype(np.dtype(getattr(ml_dtypes, name, name))) for name in names.split()}
    variables = {name: mr.Variable(value) for name, value in values.items()}
    wide = {name: np.array([3, -1]).astype(name) for name in ("int64", "float64", "complex128", ">i4", ">f8")}
    save(tmp_path, 1, variables=variables, arrays=dict(values), wide=dict(wide))
    for variable in variables.values():
        variable.assign(jnp.zeros(variable.shape, variable.dtype))
    arrays, others = ({name: np.zeros_like(value) for name, value in own.items()} for own in (values, wide))
    assert restore(tmp_path, variables=variables, arrays=arrays, wide=others) == 1
    for name, value in values.items():
        assert variables[name].numpy().tobytes() == value.tobytes() == arrays[name].tobytes(), name
    for name, value in wide.items():
        np.testing.assert_array_equal(others[name], value, strict=True)


def wrapped(value: int, shape: tuple[int, ...], impl: str = "threefry2x32") -> jax.Array:
    return jax.random.wrap_key_data(np.full(shape, value, np.uint32), impl=impl)


def test_special_floats_scalars_empty_arrays_and_keys_come_back(tmp_path: Path) -> None:
    special = np.array([np.nan, -np.nan, np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    special.view(np.uint32)[0] = 0x7FC01234  # a NaN with a payload

    def make(k: int) -> dict[str, object]:
        return {
            "special": special.copy() if k else np.zeros(6, np.float32), "empty": np.full((0, 3), k), "jax": jnp.arange(3) * k,
            "scalar": np.float32(2.5 * k),
            "key": wrapped(7 * k, (2,)), "keys": wrapped(k, (3, 4), "rbg"), "int": k * 10**30,
            "float": k * float("-inf") if k else 0.0, "bool": bool(k), "complex": k * (1 - 2j), "none": None, "nothing": [],
        }  # fmt: skip

    keys = mr.Variable(wrapped(3, (2, 2)))
    state, new = make(1), make(0)
    save(tmp_path, 0, state=state, keys=keys)
    keys.assign(wrapped(9, (2, 2)))
    assert restore(tmp_path, state=new, keys=keys) == 0 and jax.random.key_data(keys.value).tolist() == [[3, 3], [3, 3]]
    assert new["special"].tobytes() == special.tobytes() and new["empty"].shape == (0, 3)
    assert type(new["scalar"]) is np.float32 and isinstance(new["jax"], jax.Array) and new["jax"].tolist() == [0, 1, 2]
    for name in ("scalar", "int", "float", "bool", "complex", "none", "nothing"):
        assert new[name] == state[name], name
    for name in ("key", "keys"):
        assert new[name].dtype == state[name].dtype
        np.testing.assert_array_equal(jax.random.key_data(new[name]), jax.random.key_data(state[name]))
    state = {"epoch": 3}  # without any array
    save(tmp_path / "other", 1, state=state)
    state["epoch"] = 0
    assert restore(tmp_path / "other", state=state) == 1 and state == {"epoch": 3}


class Alike(str):
    """A key of a dict that is shown like others."""

    def __repr__(self) -> str:
        return "alike"


def test_restored_values_take_their_place_in_nests(tmp_path: Path) -> None:
    def make(x: float) -> dict[str, object]:
        return {
            "deep": [Pair(x, (jnp.full(2, x), {"a": x})), OrderedDict(b=x)],
            "optax": optax.adam(0.1).init({"w": jnp.full(3, x)}),
            "1": x + 1, "a/b": x, "..": x, "nul\0": x, "['a']": x,
        }  # fmt: skip

    with pytest.raises(ValueError, match=r"mr.Checkpoint: state\['a'\] cannot .* sorting pytree dictionary keys.* '1' for 1\."):
        Checkpoint(tmp_path, state={"a": {1: 0.0, "1": 0.0}})
    with pytest.raises(ValueError, match=r"two values have the path .*alike.*; give their keys different names"):
        Checkpoint(tmp_path, state={Alike("a"): 0.0, Alike("b"): 0.0})
    old, new = make(1.5), make(0.0)
    deep, inner = new["deep"], new["deep"][0].second[1]
    save(tmp_path, 4, state=old)
    assert restore(tmp_path, state=new) == 4
    assert new["deep"] is deep and new["deep"][0].second[1] is inner
    assert isinstance(new["deep"][0], Pair) and isinstance(new["deep"][1], OrderedDict)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    jax.tree.map(np.testing.assert_array_equal, new, old)
    assert not (tmp_path.parent / "b").exists() and {p.name for p in tmp_path.iterdir()} == {"4"}


class Place:
    """An iterator that is at a place, and may not take another."""

    def __init__(self, is_fixed: bool = False) -> None:
        self.at, self._is_fixed = 5, is_fixed

    def get_state(self) -> int:
        return self.at

    def set_state(self, at: int) -> None:
        if self._is_fixed:
            raise ValueError(f"not {at}")
        self.at = at


def test_an_iterator_without_a_position_is_refused_before_the_first_step(tmp_path: Path) -> None:
    strategy = strategy_of(2)
    plain, late = (Reiterable(lambda: iter([np.ones(4, np.float32)])) for _ in range(2))
    late.state_dict = lambda: {"object": object()}  # known after the first batch, and not what JSON has
    late.load_state_dict = quiet
    batches = iter(strategy.distribute_dataset(plain))
    with pytest.raises(
        TypeError, match=r"position of state\['batches'\] cannot be saved: Reiterable has no position .* StatefulDataLoader"
    ):
        Checkpoint(tmp_path / "a", state={"batches": batches})
    assert not (tmp_path / "a").exists()
    batches = iter(strategy.distribute_dataset(late))
    Checkpoint(tmp_path / "a", state={"batches": batches})
    with pytest.raises(
        TypeError, match=r"mr\.Checkpoint cannot save the position of this iterator: its state holds .* which JSON cannot hold"
    ):
        next(batches)
    assert next(iter(strategy.distribute_dataset(late))).shape == (2,), "whose position nobody wants"


def test_each_worker_gets_back_its_own_position() -> None:
    """And that of the first when their number has changed, which an iterator may refuse."""
    leaves = {"data": Place()}
    saved = _state.take_snapshot(leaves, [{"data": 0}, {"data": 1}], is_kept=True)
    for worker, num_workers, expected in [(0, 2, 0), (1, 2, 1), (0, 1, 0), (1, 3, 0), (2, 3, 0)]:
        moved = _state.restore_positions(leaves, saved, worker, num_workers)
        assert leaves["data"].at == expected
        _state.undo_positions(moved)
        assert leaves["data"].at == 5


def test_mirrored_sync_on_read_and_plain_are_exchangeable(tmp_path: Path, per_replica) -> None:
    """And a sync-on-read variable keeps all bits on the same replicas, and on others its value, if it has one."""

    def make(kind: str) -> object:
        if kind == "numpy":
            return np.zeros(2, np.float32)
        options = {} if kind == "mirrored" else {"synchronization": "on_read", "aggregation": kind}
        return mr.Variable(np.zeros(2, np.float32), **options)

    kinds = ("mirrored", "numpy", "sum", "mean", "none")
    for source in kinds:
        with strategy_of(3).scope() as strategy:
            saved = {"x": make(source)}
            rows = per_replica(strategy, *np.array([[0.1, np.nan], [0.2, 7.0], [0.3, 7.0]], np.float32))
            if source in kinds[2:]:
                strategy.run(lambda x, v=saved["x"]: quiet(v.assign(x)), args=(rows,))
            elif source == "mirrored":
                saved["x"].assign([3.0, 4.0])
            else:
                saved["x"] += np.array([5.0, 6.0], np.float32)
            expected = None if source == "none" else np.asarray(saved["x"])
            save(tmp_path / source, 1, v=saved)
            if source in kinds[2:]:
                before = np.asarray(saved["x"]._array).tobytes()
                strategy.run(lambda v=saved["x"]: quiet(v.assign(v * 0)))
                assert restore(tmp_path / source, v=saved) == 1
                assert np.asarray(saved["x"]._array).tobytes() == before, source
        for target in kinds:
            with strategy_of(2).scope():
                new = {"x": make(target)}
                if expected is not None and target != "none":
                    assert restore(tmp_path / source, v=new) == 1
                    np.testing.assert_array_equal(np.asarray(new["x"]), expected, err_msg=f"{source} to {target}")
                    continue
                told = "Give the variable an aggregation" if expected is not None else "saved as 3 values, .* NONE.* Restore on 3"
                with pytest.raises(CheckpointError, match=told):
                    restore(tmp_path / source, v=new)


def test_a_count_too_large_for_one_number_comes_back_where_each_replica_has_a_part(tmp_path: Path, caplog) -> None:
    def count() -> mr.Variable:
        return mr.Variable(0, name="count", synchronization="on_read", aggregation="sum")

    with strategy_of(3).scope() as strategy:
        seen, other = count(), mr.Variable(0)
        strategy.run(lambda: quiet(seen.assign(800_000_000)))
        save(tmp_path, 1, seen=seen, other=other)
        strategy.run(lambda: quiet(seen.assign(0)))
        assert restore(tmp_path, seen=seen, other=other) == 1
        assert [int(copy) for copy in strategy.local_results(seen)] == [800_000_000] * 3
        with np.load(tmp_path / "1" / "arrays.npz") as arrays:
            assert 2_400_000_000 in [array for array in arrays.values() if not array.shape], "for those who read the file"
    for num_replicas in (1, 2):
        with strategy_of(num_replicas).scope():
            told = r"seen was saved as 3 values whose sum 2400000000 does not fit int32\. Restore on 3 replicas, or leave it out"
            with pytest.raises(CheckpointError, match=told):
                restore(tmp_path, seen=count(), other=mr.Variable(5))


@pytest.mark.by_xla
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


# -- steps, retention, what is in the directory


def test_the_same_step_is_saved_once_and_an_older_one_is_refused(tmp_path: Path, caplog) -> None:
    w = mr.Variable(1.0)
    with Checkpoint(tmp_path, max_to_keep=None, w=w) as checkpoint, caplog.at_level(logging.INFO, "mirrored"):
        assert checkpoint.restore_latest() is None and not any(tmp_path.iterdir()), "nothing there restores nothing"
        for step in (0, 1, 2, 4, 5, 5):
            checkpoint.save(step)
        assert "step 5 is saved already" in caplog.text
    assert checkpoint.steps() == [0, 1, 2, 4, 5]
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
    """Also directories of other checkpoints, such as one for each fold of the data."""
    directory, outside = tmp_path / "ckpt", tmp_path / "outside"
    w = mr.Variable(3.0)
    save(directory, 2, w=w)
    shutil.copytree(directory / "2", outside)
    shutil.copytree(directory / "2", directory / "6")
    save(directory / "5", 7, w=w)
    for name in ("3", "07", ".saving-4-99"):
        (directory / name).mkdir()
    (directory / "9").symlink_to(outside)
    for name in ("8", "notes.txt"):
        (directory / name).write_text("mine")
    before = {p: p.read_bytes() for p in files_of(outside)}
    assert restore(directory, w=w.assign(0.0)) == 2 and float(w) == 3.0
    for text in (
        "3 is an empty directory", "9 is a symbolic link", "8 is not a directory", "07 is not", "cut short",
        "5 was not written by mr.Checkpoint", "step 6 in", "is that of step 2",
    ):  # fmt: skip
        assert text in caplog.text, text
    assert "notes.txt" not in caplog.text, "a file is the user's own"
    shutil.rmtree(directory / "6")
    with Checkpoint(directory, max_to_keep=1, w=w, max_failed_saves=9) as checkpoint:
        assert checkpoint.steps() == [2]
        checkpoint.save(3)  # takes the place of the empty directory
        assert checkpoint.wait() == 3
        for step in (5, 8, 9):
            checkpoint.save(step)
            assert checkpoint.wait() == 3 and f"saving step {step}" in caplog.text
        checkpoint.save(10)
    assert {p: p.read_bytes() for p in files_of(outside)} == before and sorted(p.name for p in directory.iterdir()) == [
        "07", "10", "5", "8", "9", "notes.txt",
    ]  # fmt: skip
    assert restore(directory / "5", w=w.assign(0.0)) == 7 and float(w) == 3.0


def test_a_mark_is_seen_where_it_is(tmp_path: Path, monkeypatch, caplog) -> None:
    """Also when it comes late, and it does not stay."""
    files, elsewhere = _files.StepFiles(tmp_path / "new"), _files.StepFiles(tmp_path / "other")
    slow = threading.Timer(0.05, lambda: (files.root.mkdir(), (files.root / "mark").touch()))
    slow.start()
    assert files.sees("mark")
    slow.join()
    (files.root / "mark").unlink()
    monkeypatch.setattr(_files, "_SEEN_SECONDS", 0.1)
    with pytest.raises(KeyError), files.mark() as mark:
        assert files.sees(mark) and not elsewhere.sees(mark) and files.scan() == ([], [])
        raise KeyError
    assert not list(files.root.iterdir()) and not elsewhere.root.exists() and elsewhere.scan() == ([], [])
    old, young = files.root / ".shared-0", files.root / ".shared-1"  # of programs that were killed, and of one that may run
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    files.write(1, {}, {"leaves": {}})
    assert young.exists() and not old.exists() and files.scan() == ([1], [])
    (tmp_path / "file").touch()
    with _files.StepFiles(tmp_path / "file" / "new").mark() as mark:
        assert mark is None and "cannot be found out" in caplog.text


def test_names_and_arguments_are_checked_and_a_directory_stays_where_it_was_when_the_program_leaves(
    tmp_path: Path, monkeypatch
) -> None:
    """Besides those in tests/test_bad_input.py."""
    monkeypatch.chdir(tmp_path)
    w = mr.Variable(0.0)
    for name in ("/abs", ".hidden", "", "a/b", "a\0b", "x" * 129, "ü", "a b", "..", "a\n"):
        with pytest.raises(ValueError, match="will not do; expected 1 to 128"):
            Checkpoint(tmp_path, **{name: w})
    for directory, error in [("gs://bucket/x", ValueError), ("", TypeError)]:
        with pytest.raises(error, match="directory"):
            Checkpoint(directory, w=w)
    good = {name: mr.Variable(1.0) for name in ("a.b-c_D9", "x" * 128, "directory", "self", "9")}
    with Checkpoint("here", **good) as checkpoint:
        monkeypatch.chdir("/")
        for step in (1.5, True, None, 10**18):
            with pytest.raises(TypeError, match="expected an int of at least 0"):
                checkpoint.save(step)
        checkpoint.save(np.int64(3))
        assert checkpoint.restore_latest() == 3 and (tmp_path / "here" / "3").is_dir()
    for call in (lambda: checkpoint.save(4), checkpoint.restore_latest, checkpoint.wait):
        with pytest.raises(ValueError, match=r"after close\(\)"):
            call()
    checkpoint.close()


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path, strategy2: mr.Strategy, per_replica) -> None:
    with iter(strategy2.distribute_dataset([np.arange(2)])) as iterator:
        position = iterator.get_state()
    for named, message in (
        ({}, "got nothing to save"),
        ({"epoch": 3}, r"epoch is 3, and a restored value could not be put in its place.*state=\{'epoch': 0\}"),
        ({"x": (jnp.zeros(2), {"a": 1})}, r"x\[0\] is .*could not be put in its place"),
        ({"x": "text"}, "x is 'text' of type str; expected variables"),
        ({"x": {"s": position}}, r"policy.*iterator itself"),
        ({"x": {"f": print}}, r"x\['f'\] is .* of type builtin_function"),
        ({"x": {"o": np.array([None])}}, r"x\['o'\]"),
        ({"x": {"d": np.array(["2026-01-01"], "M8[s]")}}, r"x\['d'\]"),
        ({"x": {"a": per_replica(strategy2, 1.0, 2.0)}}, r"x\['a'\] is a PerReplica.*strategy.reduce.*on_read"),
    ):
        with pytest.raises(TypeError, match=message):
            Checkpoint(tmp_path / "new", **named)
    with pytest.raises(TypeError, match=r"x\['a'\] is a traced value; save outside of jit"):
        jax.jit(lambda x: Checkpoint(tmp_path / "new", x={"a": x}))(1.0)
    assert not (tmp_path / "new").exists()


# -- what does not fit


def test_all_differences_are_listed_before_anything_changes(tmp_path: Path) -> None:
    strategy = strategy_of(2)
    with strategy.scope(), iter(strategy.distribute_dataset([np.arange(2)])) as iterator:
        old = {"a": mr.Variable(1.0), "b": mr.Variable([1.0, 2.0]), "c": mr.Variable(1), "d": 3, "gone": mr.Variable(0.0)}
        save(tmp_path, 1, state=old, key={"k": jax.random.key(0)}, data=iterator)
        new = {"a": mr.Variable(7.0), "b": mr.Variable([7.0, 7.0, 7.0]), "c": mr.Variable(7.0), "d": np.zeros(2), "new": 5}
        with pytest.raises(CheckpointError) as caught:
            restore(tmp_path, state=new, key={"k": jax.random.key(0, impl="rbg")}, data=mr.Variable(0.0))
    lines = str(caught.value).splitlines()
    assert "nothing has changed" in lines[0] and "Give it the same objects" in lines[-1]
    assert "partial=True" not in str(caught.value), "which would not help, though some are in the checkpoint only"
    assert [line.split(" is ")[0].split(" (")[0].strip() for line in lines[1:-1]] == [
        "data", "key['k']", "state['b']", "state['c']", "state['d']", "state['gone']", "state['new']",
    ]  # fmt: skip
    assert "state['b'] is mirrored float32[3] here, and mirrored float32[2] in the checkpoint" in str(caught.value)
    assert [float(new["a"]), new["c"].numpy().item(), new["new"]] == [7.0, 7.0, 5]


def test_a_number_takes_a_single_number_that_was_saved_as_an_array(tmp_path: Path) -> None:
    """Such as the least loss so far, which begins as `float("inf")`."""
    saved = [np.float32(0.1), jnp.float32(0.25), jnp.bfloat16(1.5), np.uint64(2**64 - 1), np.array(True), np.complex64(1j)]
    save(tmp_path, 1, state={"epoch": 1, "values": saved, "key": 0, "shape": np.zeros(1), "variable": mr.Variable(2.0)})
    state = {"epoch": 0, "values": [float("inf"), 0, 0.0, 0, False, 0.0], "key": 0}
    state |= {"shape": np.ones(1), "variable": mr.Variable(0.0)}
    assert restore(tmp_path, state=state) == 1 and state["epoch"] == 1
    assert state["values"] == [float(np.float32(0.1)), 0.25, 1.5, 2**64 - 1, True, 1j]
    assert [type(value) for value in state["values"]] == [float, float, float, int, bool, complex]
    save(tmp_path, 2, state={**state, "key": jax.random.key(0)})
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, state={**state, "shape": 0.0, "variable": 0.0})
    for path in ("key", "shape", "variable"):
        assert f"state['{path}'] is number here, and" in str(caught.value)


def test_an_iterator_that_refuses_its_position_leaves_all_as_it_was(tmp_path: Path, strategy2: mr.Strategy) -> None:
    rows = strategy2.make_numpy_dataset(np.arange(8)).batch(2)
    with strategy2.scope():
        w, dataset = mr.Variable(1.0), strategy2.distribute_dataset(rows)
        with iter(dataset) as iterator:
            next(iterator)
            save(tmp_path, 1, w=w, data=iterator, other=Place(is_fixed=True))
        w.assign(2.0)
        with iter(dataset) as iterator:
            next(iterator), next(iterator), next(iterator)
            message = r"(?s)an iterator does not take its position: ValueError: not 5.*its beginning:\n.*partial=True\)"
            with pytest.raises(CheckpointError, match=message):
                restore(tmp_path, w=w, data=iterator, other=Place(is_fixed=True))
            assert float(w) == 2.0
            assert [value.tolist() for value in next(iterator).values] == [[6], [7]]


def test_what_does_not_fit_another_worker_is_restored_on_none(tmp_path: Path, strategy2: mr.Strategy, monkeypatch) -> None:
    w = mr.Variable(1.0)
    with iter(strategy2.distribute_dataset([np.arange(2) + k for k in range(4)])) as iterator:
        save(tmp_path, 3, w=w, data=iterator)
        next(iterator), w.assign(5.0)
        for key, told, message in [
            ("id", ["2020-02-02T00:00:00Z", "0"], r"\(worker 0\) holds a step 3 of .*\(worker 1\) holds a step 3 of 2020-02-02"),
            ("partial_fits", True, "nothing has changed:\n  it does not fit"),
        ]:
            other = {key: told} | ({"problems": ["it does not fit"]} if key == "partial_fits" else {})
            with Checkpoint(tmp_path, w=w, data=iterator) as checkpoint, monkeypatch.context() as patch:
                patch.setattr(checkpoint, "_exchange", lambda own, where, k=key, o=other: [own, own | o if k in own else own])
                with pytest.raises(CheckpointError, match=message):
                    checkpoint.restore_latest()
            assert float(w) == 5.0
        assert [value.tolist() for value in next(iterator).values] == [[1], [2]], "and it is where it was"


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
        ({"w": w, "qu": mr.Variable(0.0)}, r"qu \(mirrored float32\[\]\) is not in the checkpoint\n"),
        ({"w": w, "othr": mr.Variable(0.0)}, r"othr .* is not in the checkpoint, which has other\n"),
        ({"w": w, "other": mr.Variable([0.0])}, r"other is mirrored float32\[1\] here, and mirrored float32\[\] in"),
    ]:
        with pytest.raises(CheckpointError, match=problem) as caught:
            partly(**named)
        assert "partial=True" not in str(caught.value), "which would not help"
    assert w.numpy().tolist() == [0.0, 0.0] and state == {"epoch": 0}
    assert partly(w=w, state=state) == 2 and w.numpy().tolist() == [3.0, 4.0] and state == {"epoch": 2}
    data = tmp_path / "2" / "arrays.npz"
    flip(data, 4 * data.stat().st_size)
    assert partly(state=state) == 1 and state == {"epoch": 1} and "step 2" in caplog.text, "though the arrays are not wanted"


def test_what_the_last_step_and_the_copies_show_to_be_wrong_is_never_saved(tmp_path: Path, strategy2: mr.Strategy) -> None:
    def differs(_: object) -> None:
        raise mr.ReplicasDivergeError("the argument `x` is not the same on all workers")

    with strategy2.scope():
        w, other = mr.Variable(np.zeros(3, np.float32), name="w"), mr.Variable(0.0, name="other")
    with strategy2.scope(), Checkpoint(tmp_path, w=w) as checkpoint:
        in_flight.joined(jnp.zeros(()), differs)
        with pytest.raises(mr.ReplicasDivergeError, match="argument `x`"):
            checkpoint.save(1)
        good = w._array
        for variable in (w, other):
            shards = [jax.device_put(variable.numpy() + i, device) for i, device in enumerate(strategy2.devices)]
            sharding = variable._array.sharding
            variable._array = jax.make_array_from_single_device_arrays(variable.shape, sharding, shards)
        with pytest.raises(mr.ReplicasDivergeError, match="copies of variable 'w' differ"):
            checkpoint.save(1)
        assert checkpoint.wait() is None
        w._array = good
        checkpoint.save(1)  # it does not hold `other`
        assert checkpoint.wait() == 1
        with pytest.raises(mr.ContextError, match="inside a step"):
            jax.jit(lambda: checkpoint.restore_latest())()


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


def test_a_flipped_bit_of_a_step_is_found_or_says_nothing_of_the_arrays(tmp_path: Path) -> None:
    arrays = {"d0": np.arange(6, dtype=np.float32), "d1": np.zeros((0, 3), np.int32), "h0": np.array(3, ml_dtypes.bfloat16)}
    files = _files.StepFiles(tmp_path)
    files.write(1, arrays, {"leaves": {}})
    silent = 0
    for path in files_of(tmp_path / "1"):
        original = path.read_bytes()
        for bit in range(0, 8 * len(original), 61):
            flip(path, bit)
            try:
                found = files.read(1)[1]
            except _files.DamagedStep:
                found = None
            path.write_bytes(original)
            if found is not None:
                silent += 1
                assert all(found[key].dtype == array.dtype for key, array in arrays.items())
                assert all(found[key].tobytes() == array.tobytes() for key, array in arrays.items())
    assert silent < 8 * 300 / 61, "times and versions of three members of the zip"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_saves_lose_nothing_that_was_committed() -> None:
    script = Path(__file__).parents[1] / "chaos_saves.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([sys.executable, script, "10"], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr


def test_other_damage_is_found_and_only_plain_files_are_opened(tmp_path: Path, monkeypatch, caplog) -> None:
    """A FIFO would let it wait, and a link to /dev/zero read, for ever."""
    named = trained(tmp_path / "sound")
    data, record = Path("2", "arrays.npz"), Path("2", "record.json")
    text = (tmp_path / "sound" / record).read_bytes()
    wrong = json.loads(text)
    wrong["record"]["step"] = 1
    damages: list[tuple[Path, Callable[[Path], object]]] = [
        (data, lambda path: os.truncate(path, path.stat().st_size - 1)),
        (data, lambda path: os.truncate(path, 0)),
        (data, Path.unlink),
        (data, lambda path: path.symlink_to(path.rename(tmp_path / "moved"))),
        (record, Path.unlink),
        (record, lambda path: (path.unlink(), os.mknod(path, stat.S_IFSOCK | 0o600))),
        (record, lambda path: path.symlink_to(path.rename(tmp_path / "elsewhere"))),
    ]
    for content in (b"", b"null", b"\xff\xfe", b"[" * 100000, json.dumps(wrong).encode(), text[:-3]):
        damages.append((record, lambda path, content=content: path.write_bytes(content)))
    for victim in (data, record):
        damages += [
            (victim, lambda path: (path.unlink(missing_ok=True), os.mkfifo(path))),
            (victim, lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero"))),
            (victim, lambda path: (path.unlink(missing_ok=True), path.mkdir(), (path / "a").touch())),
            (victim, lambda path: (path.touch(), os.truncate(path, 2**40))),
        ]
    for number, (victim, damage) in enumerate(damages):
        directory = shutil.copytree(tmp_path / "sound", tmp_path / str(number))
        damage(directory / victim)
        caplog.clear()
        assert restore(directory, **named) == 1, number
        [error] = errors_of(caplog)
        assert f"step 2 in {directory} is damaged and is not used: file {victim.name} " in error, number
    assert restore(tmp_path / "sound", **named) == 2
    monkeypatch.setattr(_files, "MAX_RECORD_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"step 2: file record.json cannot be used: it has more than 10 bytes"):
        restore(tmp_path / "sound", **named)


def refuse(patch: pytest.MonkeyPatch, owner: object, name: str, refused: str, error: Exception) -> None:
    """Let a function raise an error for each path whose name is `refused`."""
    real = getattr(owner, name)

    def refusing(path: str | os.PathLike[str] = ".", *more: object, **named: object) -> object:
        if os.path.basename(path) == refused:
            raise error
        return real(path, *more, **named)

    patch.setattr(owner, name, refusing)


def test_what_could_not_be_read_is_no_damage(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path / "saved")
    named["w"].assign(np.zeros((40, 50), np.float32))
    # What fails, for what path in a step, with what, and what of the path is in the message.
    for number, (owner, name, refused, error, shown) in enumerate(
        [
            (os, "open", "record.json", OSError(errno.EMFILE, "too many"), "2/record.json"),
            (os, "open", "arrays.npz", OSError(errno.EACCES, "denied"), "2/arrays.npz"),
            (_files, "_decode", "", OSError(errno.EIO, "input/output"), "/2"),
            (zipfile.ZipFile, "testzip", "", OSError(errno.ESTALE, "stale"), "2/arrays.npz"),
            (np.lib.format, "read_array", "", MemoryError("no memory"), "/2"),
        ]
    ):
        directory = shutil.copytree(tmp_path / "saved", tmp_path / str(number))
        before = {path: path.read_bytes() for path in files_of(directory)}
        with Checkpoint(directory, max_to_keep=2, **named) as checkpoint, monkeypatch.context() as patch:
            if refused:
                refuse(patch, owner, name, refused, error)
            else:  # as from `file.read()`, which names no file
                patch.setattr(owner, name, lambda *args, error=error: (_ for _ in ()).throw(error))
            with pytest.raises(CheckpointError) as caught:
                checkpoint.restore_latest()
        text = str(caught.value)
        assert str(error).partition(":")[0] in text and shown in text and "nothing was restored or removed" in text
        assert f"mv {directory}/2 {directory}/unread-2" in text and "damaged" not in text + caplog.text
        assert {path: path.read_bytes() for path in files_of(directory)} == before and not named["w"].numpy().any()
    assert restore(directory, **named) == 2 and named["w"].numpy().any(), "and it can be run again"
    (directory / "2").rename(directory / "unread-2")  # the way to go on that the message names
    assert restore(directory, **named) == 1


def test_a_step_that_another_process_removes_says_so(tmp_path: Path, monkeypatch) -> None:
    named = trained(tmp_path)

    def removed(*_: object) -> None:
        shutil.rmtree(tmp_path / "2")
        raise FileNotFoundError("no such file")

    monkeypatch.setattr(_files, "_decode", removed)
    with pytest.raises(CheckpointError, match=r"step 2 was removed while it was read, by another process .*max_to_keep"):
        restore(tmp_path, **named)


def test_no_step_is_passed_over_where_one_worker_could_not_read_it(tmp_path: Path, monkeypatch) -> None:
    named = trained(tmp_path)
    for here in ("whole", "unread", "unlisted", "damaged"):
        told: list[dict[str, object]] = []

        def exchange(own: dict[str, object], where: str, told=told, here=here) -> list[dict[str, object]]:
            told.append(own)
            return [own, {**own, "error": "of worker 1"} if "problems" in own and here in ("whole", "damaged") else own]

        with Checkpoint(tmp_path, **named) as checkpoint, monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_exchange", exchange)
            if here == "damaged":
                flip(tmp_path / "2" / "arrays.npz", 9)
            elif here == "unread":
                refuse(patch, os, "open", "record.json", OSError(errno.EIO, "Input/output error"))
            elif here == "unlisted":
                refuse(patch, os, "listdir", "2", PermissionError(errno.EACCES, "Permission denied"))
            worker = 0 if here.startswith("un") else 1
            with pytest.raises(CheckpointError, match=f"failed on worker {worker}, and nothing was done"):
                checkpoint.restore_latest()
            assert len(told) == (1 if here == "unlisted" else 2), "the others have been told"
    assert checkpoint.steps() == [1, 2]


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
    assert [path for what, path in done[:named] if what == "sync"] == [new / "arrays.npz", new / "record.json", new]


def test_another_steps_arrays_are_found_and_another_format_is_not_taken_for_damage(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path)
    shutil.copy(tmp_path / "1" / "arrays.npz", tmp_path / "2" / "arrays.npz")
    assert restore(tmp_path, **named) == 1
    assert "step 2" in caplog.text and "array w is damaged: its CRC-32 is not the one that was written" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(_files, "FORMAT", 5)
        save(tmp_path / "later", 1, **named)
    with pytest.raises(
        CheckpointError, match=r"has format 5, .*written by.*this is mirrored .* Read it with what has written it"
    ):
        restore(tmp_path / "later", **named)


def rewrite(step: Path, change: Callable[[dict], object]) -> None:
    """Change a record in place, and give it the right checksum."""
    record = _files._decode((step / "record.json").read_bytes())
    change(record)
    (step / "record.json").write_bytes(_files._encode(record))


def test_a_record_that_no_save_writes_is_damage_before_anything_is_assigned(tmp_path: Path, strategy2, caplog) -> None:
    """As of a program that computes a right checksum over a wrong record."""
    state = {"best": 0.5}
    with strategy2.scope(), iter(strategy2.distribute_dataset([np.arange(2)])) as batches:
        a, z = mr.Variable(np.zeros(3, "f4")), mr.Variable(0.0)
        named = {"a": a, "batches": batches, "state": state, "z": z}
        named["seen"] = mr.Variable(0, synchronization="on_read", aggregation="sum")
        with Checkpoint(tmp_path / "sound", **named) as checkpoint:
            checkpoint.save(1), checkpoint.save(2)
        assert restore(tmp_path / "sound", **named) == 2
        lists = "file record.json has no list of the leaves or of the arrays"
        arrays = "file arrays.npz does not hold the arrays that record.json lists"
        said = r"record.json says of {} what no save writes: {}".format
        best = r"state\['best'\]"
        for number, (change, told) in enumerate(
            [
                (lambda its: its.pop("leaves"), lists),
                (lambda its: its.update(arrays=[]), lists),
                (lambda its: its["leaves"].update(a=3), lists),
                (lambda its: its["arrays"]["d0"].update(shape=[1, 3]), arrays),
                (lambda its: its["arrays"]["d0"].update(shape=[10**13]), arrays),
                (lambda its: its["arrays"]["d0"].update(shape=[-1, -3]), arrays),
                (lambda its: its["arrays"]["d0"].pop("shape"), arrays),
                (lambda its: its["arrays"]["d0"].update(dtype="O"), arrays),
                (lambda its: its["arrays"]["d0"].pop("crc32"), "array a is damaged"),
                (lambda its: its["leaves"]["a"].update(value="d9"), said("a", "KeyError: 'd9'")),
                (lambda its: its["leaves"]["a"].update(kind="other"), said("a", "KeyError: 'other'")),
                (lambda its: its["leaves"]["state['best']"].update(type="__import__"), said(best, "KeyError: '__import__'")),
                (lambda its: its["leaves"]["state['best']"].update(value="two"), said(best, "ValueError: could not convert")),
                (lambda its: its["leaves"]["state['best']"].update(value=2), said(best, "AttributeError")),
                (lambda its: its["leaves"]["batches"].update(by_worker=[]), said("batches", "IndexError")),
                (lambda its: its["leaves"]["z"].update(copies="d9"), said("z", "KeyError: 'd9'")),
                (lambda its: its["leaves"]["seen"].update(copies="d0"), said("seen", "ValueError: its copies are not like")),
            ]
        ):
            directory = shutil.copytree(tmp_path / "sound", tmp_path / str(number))
            rewrite(directory / "2", change)
            a.assign(np.ones(3)), z.assign(1.0), state.update(best=7.0), caplog.clear()
            assert restore(directory, **named) == 1, number
            [error] = errors_of(caplog)
            assert re.search(rf"step 2 in {directory} is damaged and is not used: {told}", error), error
            assert float(z) == 0.0 and not a.numpy().any() and state == {"best": 0.5}


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_array_larger_than_its_record_says_is_not_read_into_memory(tmp_path: Path, monkeypatch, caplog, compression) -> None:
    named = trained(tmp_path)
    path, key = tmp_path / "2" / "arrays.npz", "d0"
    with zipfile.ZipFile(path) as zipped:
        members = {name: zipped.read(name) for name in zipped.namelist()}
    members[f"{key}.npy"] += bytes(10**6)
    with zipfile.ZipFile(path, "w", compression) as zipped:
        for name, content in members.items():
            zipped.writestr(name, content)
        [crc] = [info.CRC for info in zipped.infolist() if info.filename == f"{key}.npy"]
    rewrite(tmp_path / "2", lambda its: its["arrays"][key].update(crc32=crc))
    read, sizes = np.lib.format.read_array, []
    monkeypatch.setattr(np.lib.format, "read_array", lambda file: sizes.append((array := read(file)).size) or array)
    assert restore(tmp_path, **named) == 1 and sizes == [9, 2000, 7], "of step 1"
    told = "it is compressed, which no save does" if compression else r"d0.npy is \S* in 10\d* bytes, and was "
    assert re.search(told, caplog.text)


def test_files_that_cannot_be_deleted_are_named(tmp_path: Path, monkeypatch, caplog) -> None:
    w = mr.Variable(0.0)
    with Checkpoint(tmp_path, max_to_keep=1, w=w) as checkpoint:
        checkpoint.save(1)
        checkpoint.wait()
        monkeypatch.setattr(_files.shutil, "rmtree", lambda path, ignore_errors=False: None)
        checkpoint.save(2)
        checkpoint.wait()
    assert "step 1 was removed, but its files could not be deleted; delete " in caplog.text and ".removed-1-" in caplog.text


def test_damaged_steps_make_room_for_new_ones(tmp_path: Path, monkeypatch, caplog) -> None:
    w = mr.Variable(0.0)
    with Checkpoint(tmp_path, max_to_keep=2, w=w) as checkpoint:
        for step in (20, 30):
            w.assign(float(step))
            checkpoint.save(step)
    for damaged in (30, 25):
        flip(tmp_path / str(damaged) / "record.json", 50)
        with Checkpoint(tmp_path, max_to_keep=2, w=w) as checkpoint:
            assert checkpoint.restore_latest() == 20 and float(w) == 20.0
            assert checkpoint.steps() == [20, damaged], "nothing goes before something newer is there"
            w.assign(2525.0)
            checkpoint.save(25)
            checkpoint.wait()
            assert checkpoint.steps() == [20, 25]
    assert restore(tmp_path, w=w) == 25 and float(w) == 2525.0
    flip(tmp_path / "25" / "record.json", 50)  # and it cannot be removed
    refuse(monkeypatch, os, "rename", "25", PermissionError(13, "Permission denied"))
    with Checkpoint(tmp_path, w=w) as checkpoint:
        assert checkpoint.restore_latest() == 20
        for step in (21, 22):
            checkpoint.save(step)
            assert checkpoint.wait() == step, "it does not count all the same"
    assert "step 25" in caplog.text and "could not be removed" in caplog.text
    for step in ("20", "21", "22"):
        flip(tmp_path / step / "arrays.npz", 9)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"(?s)no step in .* is undamaged:\n  step 25: .*\n  step 22: .*\n  step 20: array"):
        restore(tmp_path, w=w.assign(1.0))
    assert float(w) == 1.0 and sorted(path.name for path in tmp_path.iterdir()) == before


# -- writes that fail


def test_failed_saves_are_logged_and_too_many_end_training(tmp_path: Path, monkeypatch, caplog) -> None:
    """As on a full disk; here a limit of the system lets writing of the arrays fail, and once the first file."""

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    state = {"x": np.zeros(30_000)}
    with Checkpoint(tmp_path, max_failed_saves=2, state=state) as checkpoint:
        checkpoint.save(1)
        assert checkpoint.wait() == 1
        with full():
            checkpoint.save(2)
            assert checkpoint.wait() == 1
        [error] = errors_of(caplog)
        assert "saving step 2" in error and "File too large" in error and "the last step there is 1" in error
        checkpoint.save(3)
        assert checkpoint.wait() == 3
        with full():
            checkpoint.save(4)
            checkpoint.save(5)
            told = r"failed 2 times in a row: step 4: OSError.*; step 5: .*last step there is 3"
            with pytest.raises(CheckpointError, match=told):
                checkpoint.save(6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    refuse(monkeypatch, _files, "_synced", "arrays.npz", OSError(5, "Input/output error"))
    checkpoint = Checkpoint(tmp_path / "other", state=state)
    checkpoint.save(1)
    with pytest.raises(CheckpointError, match=r"no later save has made up for it.*Input/output error"):
        checkpoint.close()
    with pytest.raises(KeyError, match="mine"), Checkpoint(tmp_path / "other", state=state) as checkpoint:
        checkpoint.save(1)
        raise KeyError("mine")


# -- around it


def test_the_launcher_is_told_of_each_commit(tmp_path: Path, monkeypatch, caplog) -> None:
    """Those of other hosts by their own workers: each launcher counts its restarts without a new checkpoint."""

    def told() -> list[tuple[str, str]]:
        return sorted((path.name, path.read_text()) for path in tmp_path.iterdir() if "progress" in path.name)

    monkeypatch.setenv("MIRRORED_PROGRESS_FILE", str(tmp_path / "progress"))
    with Checkpoint(tmp_path / "ckpt", w=mr.Variable(0.0)) as checkpoint:
        assert told() == []
        checkpoint.save(12)
        checkpoint.wait()
        [(name, text)] = told()
        assert re.fullmatch("progress-[0-9a-f]{8}", name) and text == "12"
        os.link(tmp_path / name, tmp_path / "opened by a reader")
        other = Writer(_files.StepFiles(tmp_path / "ckpt"), None, 3)  # on another worker
        other.take_record(13, ["step 14: OSError"])
        assert (other.latest, other.failures, told()) == (13, ["step 14: OSError"], [(name, "13")])
        assert (tmp_path / "opened by a reader").read_text() == "12", "it is never half written"
        (tmp_path / name).unlink()
        other.take_record(13, [])
        assert told() == [] and checkpoint.restore_latest() == 12 and told() == [(name, "12")]
        with Checkpoint(tmp_path / "best", w=mr.Variable(0.0)) as best:
            best.save(3)
        assert sorted(text for _, text in told()) == ["12", "3"]
        monkeypatch.setenv("MIRRORED_PROGRESS_FILE", str(tmp_path / "missing" / "progress"))
        shutil.rmtree(tmp_path / "ckpt")
        checkpoint.save(13)
        assert checkpoint.wait() == 13
    assert "could not be written" in caplog.text
    assert f"{tmp_path / 'ckpt'} has vanished since the last save, with the steps in it. It is made again." in caplog.text


def test_two_checkpoints_in_one_directory_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a cell of a notebook that is run twice: one sweeps while the other writes."""
    synced, other = _files._synced, _files.StepFiles(tmp_path)

    def meanwhile(path: Path) -> contextlib.AbstractContextManager[object]:
        monkeypatch.setattr(_files, "_synced", synced)
        other.claim()
        other.write(4, {"a0": np.arange(3.0)}, {"leaves": {}})
        other.release()
        return synced(path)

    monkeypatch.setattr(_files, "_synced", meanwhile)
    w = mr.Variable(5.0)
    with Checkpoint(tmp_path, w=w) as checkpoint:
        checkpoint.save(3)
        checkpoint.wait()
        assert checkpoint.steps() == [3, 4]
        assert other.read(4)[1]["a0"].tolist() == [0, 1, 2] and other.read(3)[0]["step"] == 3


def test_a_step_that_another_object_is_writing_is_neither_replaced_nor_passed_over(tmp_path: Path, monkeypatch) -> None:
    """Such as that of a cell of a notebook that was interrupted, and run again."""
    write, seen = _files.StepFiles.write, []
    monkeypatch.setattr(_files.StepFiles, "write", lambda *args: (seen.append(time.sleep(0.1)), write(*args))[1])
    w, v = mr.Variable(5.0), mr.Variable(6.0)
    with Checkpoint(tmp_path, w=w) as first:
        first.save(3)
        first.wait()
        second = Checkpoint(tmp_path, v=v)
        for step in (2, 3):
            with pytest.raises(ValueError, match=rf"save\({step}\), but .* holds step 3, which this program has not come from"):
                second.save(step)
        first.save(4)
        advice = (
            rf"(?s)save\(5\), but another .* step 4 .* was made.* mr.Checkpoint\('{tmp_path}-2', \.\.\.\).*restore_latest\(\)"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=advice):
                second.save(5)
        w.assign(0.0)
        third = Checkpoint(tmp_path, w=w)
        assert third.restore_latest() == 4 and float(w) == 5.0 and seen == [None] * 2
        third.save(5)  # the steps of the first fit
        third.close()


def test_workers_that_differ_are_told_how() -> None:
    """Texts of other workers are escaped and cut."""
    same_on_workers.require_same_call(["save(3)", "save(3)"])
    same_on_workers.require_same_kinds([{"w": "number"}] * 2)
    evil = "first\x1b[2J" + "x" * 300_000 + "\nCRITICAL all is well\x07"
    shown = r"(?s)first\\x1b\[2J.*\n  \| CRITICAL all is well\\x07"
    for check, told, message in (
        ("require_same_call", (["wait()", "save(3)"],), r"different calls .*: worker 0 wait\(\), worker 1 save\(3\)\."),
        ("require_same_kinds", ([{"w": "number"}, {"w": "iterator"}],), "w is iterator on worker 1, and number on worker 0"),
        ("require_same_kinds", ([{"w": "number"}, {}],), "w is not there on worker 1, and number on worker 0"),
        ("require_no_error", ([{"error": evil}, {}], "save"), shown),
        ("refuse_unseen_mark", ([{"where": "here", "sees": True}, {"where": evil, "sees": False}],), shown),
        ("require_shared", ([{"where": "a", "x": 1}, {"where": evil, "x": 2}], "x", str), shown),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            getattr(same_on_workers, check)(*told)
        assert len(str(caught.value)) < 10_000
    assert "\x1b" not in same_on_workers.by_first_worker([[], [evil]])[0]


# -- the end of a program


def run_slowly_saved(directory: Path, rest: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose saves take longer."""
    code = """
import os, signal, sys, threading, time
import numpy as np
import mirrored as mr
from mirrored._checkpoint import files as _files
from mirrored._workers.progress import progress
w = mr.Variable(np.zeros(100, np.float32))
checkpoint = mr.Checkpoint(sys.argv[1], w=w)
write = _files.StepFiles.write
_files.StepFiles.write = lambda *args: (time.sleep(0.2), write(*args))[1]
"""
    return run_program(code + rest, directory)


def test_a_program_that_ends_without_waiting_loses_nothing_and_its_forked_child_waits_for_nothing(tmp_path: Path) -> None:
    end = """
checkpoint.save(1)
progress.lock.acquire()  # as another thread may hold it
child = os.fork()
if not child:
    sys.exit(3)
progress.lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise ValueError("the end")
"""
    done = run_slowly_saved(tmp_path, end)
    assert (done.returncode, done.stdout) == (1, "3\n") and "the end" in done.stderr and "lost" not in done.stderr, done.stderr
    assert restore(tmp_path, w=mr.Variable(np.zeros(100, np.float32))) == 1


@pytest.mark.slow
@pytest.mark.skipif((3, 12, 0) <= sys.version_info[:3] <= (3, 12, 1), reason="this Python starts no threads at a program's end")
def test_a_save_that_begins_after_the_main_thread_has_ended_is_made(tmp_path: Path) -> None:
    by_thread = "threading.Thread(target=lambda: [time.sleep(1), checkpoint.save(2)]).start()"
    at_exit = "import atexit; atexit.register(checkpoint.save, 2)"
    for name, late in (("thread", by_thread), ("exit", at_exit)):
        done = run_slowly_saved(tmp_path / name, f"checkpoint.save(1)\ncheckpoint.wait()\n{late}")
        assert (done.returncode, done.stderr) == (0, "")
        assert restore(tmp_path / name, w=mr.Variable(np.zeros(100, np.float32))) == 2


#: Makes the thread that saves wait until the main thread waits for it, and interrupt that. The main thread must sleep: Ctrl-C
#: inside of Python's own code that begins to wait is another matter.
INTERRUPT = """
def main_thread_sleeps():
    with open(f"/proc/self/task/{os.getpid()}/stat") as file:
        is_asleep = file.read().rpartition(")")[2].split()[0] == "S"
    return is_asleep and any(phase.text == "waiting for the checkpoint" for phase in progress.phases)

def interrupt():
    num_asleep = 0
    while num_asleep < 10:
        time.sleep(0.01)
        num_asleep = num_asleep + 1 if main_thread_sleeps() else 0
    os.kill(os.getpid(), signal.SIGINT)

_files.StepFiles.write = lambda *args: (interrupt(), time.sleep(0.2), write(*args))[2]
"""


@pytest.mark.slow
def test_ctrl_c_while_the_program_waits_for_its_last_save_is_shown_and_so_is_the_loss(tmp_path: Path) -> None:
    done = run_slowly_saved(tmp_path, f"{INTERRUPT}checkpoint.save(1)")
    assert "KeyboardInterrupt" in done.stderr and "step 1 is lost: the program had ended" in done.stderr, done.stderr
    assert "where the last step is None. End the main thread with checkpoint.close(), after the last save." in done.stderr
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


def run_epochs(directory: Path, kill_at: int) -> tuple[list[str], list[str]]:
    """Train for three epochs, or up to a step; return the rows of each step, and what came out."""
    done = run_program(f"{KILLED}{RECIPE}\nprint('END', train_epochs(directory, 3)[1].hex())", directory, kill_at)
    assert done.returncode == (-9 if kill_at else 0), done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if "END" not in line], [line for line in lines if "END" in line]


@pytest.mark.slow
def test_the_epochs_of_the_docs_go_on_bit_for_bit_after_kills(tmp_path: Path) -> None:
    used, end = run_epochs(tmp_path / "whole", 0)
    parts = [run_epochs(tmp_path / "parts", kill_at) for kill_at in (3, 4, 0)]
    assert [line for part, _ in parts for line in part] == used and len(set(used)) == 9 and parts[-1][1] == end


def test_masks_are_refused_and_what_was_made_of_a_python_number_stays_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['m'\] is a masked array, .* Write array.filled\(value\)"):
        save(tmp_path, 1, state={"m": np.ma.masked_array([1.0, 2.0], mask=[0, 1])})
    state = {"rate": jnp.asarray(0.5), "strong": jnp.float32(0.5)}
    save(tmp_path, 1, state=state)
    state["rate"] = state["rate"] * 2
    assert restore(tmp_path, state=state) == 1 and float(state["rate"]) == 0.5
    half = jnp.ones(1, jnp.bfloat16)
    assert (half * state["rate"]).dtype == jnp.bfloat16 and (half * state["strong"]).dtype == jnp.float32


def test_a_step_that_takes_the_place_of_another_while_one_looks_is_seen(tmp_path: Path, monkeypatch) -> None:
    w = mr.Variable(1.0)
    save(tmp_path, 1, w=w)
    listdir = os.listdir

    def replaced(path: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", listdir)
            if os.path.basename(path) == "1":
                save(tmp_path, 2, w=w)
                shutil.rmtree(path)
            return listdir(path)

    monkeypatch.setattr(os, "listdir", replaced)
    assert _files.StepFiles(tmp_path).scan() == ([2], [])


def test_under_a_plan_nothing_is_saved_or_restored_beside_a_job_that_saves(tmp_path, monkeypatch):
    with mr.MirroredStrategy(["cpu:0"]).scope():
        beside = mr.Checkpoint(tmp_path, w=mr.Variable(1.0))
    with beside, monkeypatch.context() as patch:
        beside.save(3)
        beside.wait()
        patch.setattr(topologies, "runs_nothing", lambda device: True)
        with mr.MirroredStrategy(["cpu:1"]).scope(), mr.Checkpoint(tmp_path, w=mr.Variable(1.0)) as planned:
            assert planned.restore_latest() is None
            planned.save(1)
            assert planned.steps() == [3]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in ("file", "file/x", "file/x/y"):
        with pytest.raises(ValueError, match=r"/file is not a directory"):
            mr.Checkpoint(tmp_path / path, state={"n": 0})
