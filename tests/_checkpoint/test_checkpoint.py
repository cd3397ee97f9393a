"""Checkpoints: what is saved comes back exactly, and what cannot is said before anything changes."""

import asyncio
import contextlib
import errno
import io
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
import time
import zlib
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from parameters import slow
from processes import run_program

import mirrored as mr
from mirrored._checkpoint import checksums, same_on_workers
from mirrored._checkpoint import files as _files
from mirrored._checkpoint import state as _state
from mirrored._checkpoint.checkpoint import Checkpoint
from mirrored._checkpoint.writer import Writer
from mirrored._errors import CheckpointError
from mirrored._replicas import in_flight
from mirrored._workers.coordination import Coordination
from mirrored._workers.progress import progress

Pair = namedtuple("Pair", "first second")


def on(num_replicas: int) -> mr.MirroredStrategy:
    return mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


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
    for name in ("key", "keys"):
        assert jnp.array_equal(jax.random.key_data(new[name]), jax.random.key_data(state[name]))
    assert jax.random.normal(keys.value[1]) == drawn
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

    with pytest.raises(ValueError, match="sorting pytree dictionary keys"):
        Checkpoint(tmp_path, state={1: 0.0, "1": 0.0})
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


def test_optimizer_and_step_go_on_as_if_never_interrupted(tmp_path: Path) -> None:
    def train(strategy: mr.Strategy, directory: Path, num_steps: int) -> tuple[bytes, int]:
        with strategy.scope():
            w = mr.Variable(np.ones(3, np.float32), name="w")
            optimizer = mr.Optimizer(optax.adam(0.1), [w])
            checkpoint = Checkpoint(directory, w=w, optimizer=optimizer)

        def step(x: jax.Array) -> None:
            _, gradients = mr.value_and_grad(lambda: w * w * x, [w])()
            optimizer.apply_gradients(gradients)

        with checkpoint:
            first = checkpoint.restore_latest() or 0
            for number in range(first + 1, first + num_steps + 1):
                strategy.run(step, args=(strategy.distribute_values_from_function(lambda ctx, n=number: np.float32(n)),))
                checkpoint.save(number)
        return w.numpy().tobytes(), first

    whole, _ = train(on(2), tmp_path / "whole", 5)
    train(on(2), tmp_path / "parts", 3)
    assert train(on(2), tmp_path / "parts", 2) == (whole, 3)
    assert train(on(3), tmp_path / "parts", 0) == (whole, 5)


def test_an_optimizers_count_comes_back_and_files_from_before_it_are_restored(tmp_path: Path, strategy3: mr.Strategy) -> None:
    def make(strategy: mr.Strategy) -> tuple[mr.Variable, mr.Optimizer]:
        with strategy.scope():
            w = mr.Variable(1.0, name="w")
        return w, mr.Optimizer(optax.sgd(0.1, momentum=0.9), [w])

    w, optimizer = make(strategy3)
    for _ in range(4):
        optimizer.apply_gradients([1.0])
    save(tmp_path / "new", 4, w=w, optimizer=optimizer)
    save(tmp_path / "old", 4, w=w, optimizer=optimizer.state)  # as all were, with these paths
    for directory, count in (("new", 4), ("old", 0)):
        again, other = make(on(2))
        other.apply_gradients([5.0])
        assert restore(tmp_path / directory, w=again, optimizer=other) == 4
        assert (float(again), int(other.iterations)) == (float(w), count), directory
        other.apply_gradients([1.0])
        assert int(other.iterations) == count + 1
    state_only = make(strategy3)[1].state
    restore(tmp_path / "new", w=w, optimizer=state_only)
    np.testing.assert_array_equal(*(jax.tree.leaves(tree)[0] for tree in (state_only, optimizer.state)))


def test_each_worker_gets_back_its_own_position() -> None:
    """And that of the first when their number has changed, which an iterator may refuse."""

    class Rows:
        state = "before"

        def get_state(self) -> str:
            return self.state

        def set_state(self, state: str) -> None:
            self.state = state

    leaves = {"data": Rows()}
    saved = _state.take_snapshot(leaves, [{"data": 0}, {"data": 1}], is_kept=True)
    for worker, num_workers, expected in [(0, 2, 0), (1, 2, 1), (0, 1, 0), (1, 3, 0), (2, 3, 0)]:
        moved = _state.restore_positions(leaves, saved, worker, num_workers)
        assert leaves["data"].state == expected
        _state.undo_positions(moved)
        assert leaves["data"].state == "before"


@pytest.mark.parametrize("kind", ["numpy", "list"])
def test_no_row_is_repeated_or_lost_across_numbers_of_replicas_and_epochs(tmp_path: Path, kind: str) -> None:
    def begun(strategy: mr.MirroredStrategy) -> mr.data.DistributedIterator:
        rows = strategy.make_numpy_dataset(np.arange(8)).shuffle(seed=0).batch(3).repeat(3)
        return iter(strategy.distribute_dataset(rows if kind == "numpy" else [np.arange(i, i + 4) for i in range(9)]))

    def rows_of(batch: mr.PerReplica) -> list[int]:
        return [int(row) for value in batch.values for row in value]

    with begun(on(1)) as batches:
        whole = [rows_of(batch) for batch in batches]
    used: list[list[int]] = []
    for num_replicas, stop in ((2, 4), (3, 7), (1, 9)):
        with begun(on(num_replicas)) as batches, Checkpoint(tmp_path, batches=batches) as checkpoint:
            for step in range((checkpoint.restore_latest() or 0) + 1, stop + 1):
                used.append(rows_of(next(batches)))
                checkpoint.save(step)
    assert used == whole and len(whole) == 9 and whole[0] != whole[3]


def test_sync_on_read_with_the_same_replicas_is_bit_identical(tmp_path: Path, strategy3: mr.Strategy, per_replica) -> None:
    with strategy3.scope():
        v = {
            aggregation: mr.Variable(np.zeros(2, np.float32), synchronization="on_read", aggregation=aggregation)
            for aggregation in ("sum", "mean", "only_first_replica", "none")
        }
        values = per_replica(strategy3, *(np.array([0.1 * i, np.nan if i == 0 else 7], np.float32) for i in range(3)))
        strategy3.run(lambda x: quiet(*(one.assign(x) for one in v.values())), args=(values,))
        before = [np.asarray(one._array).tobytes() for one in v.values()]
        save(tmp_path, 1, v=v)
        strategy3.run(lambda: quiet(*(one.assign(one * 0) for one in v.values())))
        assert restore(tmp_path, v=v) == 1
        assert [np.asarray(one._array).tobytes() for one in v.values()] == before


def test_sync_on_read_with_other_replicas_keeps_its_value(tmp_path: Path, per_replica) -> None:
    def make() -> dict[str, mr.Variable]:
        return {
            aggregation: mr.Variable(np.zeros(2, dtype), synchronization="on_read", aggregation=aggregation)
            for aggregation, dtype in (("sum", np.int32), ("mean", np.float32), ("only_first_replica", np.int32))
        }

    for old, new in ((1, 3), (3, 2), (8, 1)):
        with on(old).scope() as strategy:
            v = make()
            values = per_replica(strategy, *(np.array([i + 1, 10 * i], np.int32) for i in range(old)))
            strategy.run(lambda x, v=v: quiet(*(one.assign(x.astype(one.dtype)) for one in v.values())), args=(values,))
            expected = {name: one.numpy() for name, one in v.items()}
            save(tmp_path / str(old), 1, v=v)
        with on(new).scope():
            v = make()
            assert restore(tmp_path / str(old), v=v) == 1
            for name, value in expected.items():
                np.testing.assert_array_equal(v[name].numpy(), value)


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
    kinds: dict[str, Callable[[], object]] = {
        "mirrored": lambda: mr.Variable(np.zeros(2, np.float32)),
        "jax": lambda: jnp.zeros(2),
        "numpy": lambda: np.zeros(2, np.float32),
    }
    for kind in ("sum", "mean"):
        kinds[kind] = lambda kind=kind: mr.Variable(np.zeros(2, np.float32), synchronization="on_read", aggregation=kind)
    for source, make in kinds.items():
        with on(3).scope() as strategy:
            saved = {"x": make()}
            if source in ("sum", "mean"):
                rows = per_replica(strategy, *np.eye(3, 2, dtype=np.float32))
                strategy.run(lambda x, v=saved["x"]: quiet(v.assign(x)), args=(rows,))
            elif source == "mirrored":
                saved["x"].assign([3.0, 4.0])
            else:
                saved["x"] += np.array([5.0, 6.0], np.float32)
            expected = np.asarray(saved["x"])
            save(tmp_path / source, 1, v=saved)
        with on(2).scope():
            for target, make_new in kinds.items():
                new = {"x": make_new()}
                assert restore(tmp_path / source, v=new) == 1
                np.testing.assert_array_equal(np.asarray(new["x"]), expected, err_msg=f"{source} to {target}")


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


def test_one_save_at_a_time_and_the_guard_is_told_where_workers_wait(tmp_path: Path, monkeypatch) -> None:
    running, most, waits = [], [], []
    write, exchange = _files.StepFiles.write, Coordination.exchange

    def counted(*args):
        running.append(1)
        most.append(len(running))
        result = write(*args)
        running.pop()
        return result

    def noted(self, channel: str, value: object) -> Sequence[object]:
        waits.append(progress.phases[-1].text)
        return exchange(self, channel, value)

    monkeypatch.setattr(_files.StepFiles, "write", counted)
    monkeypatch.setattr(Coordination, "exchange", noted)
    with Checkpoint(tmp_path, max_to_keep=None, w=mr.Variable(0.0)) as checkpoint:
        assert checkpoint.restore_latest() is None and not any(tmp_path.iterdir()), "nothing there restores nothing"
        for step in range(5):
            checkpoint.save(step)
    assert most == [1] * 5 and checkpoint.steps() == [0, 1, 2, 3, 4]
    assert waits[:2] + waits[-1:] == ["checkpoint.restore_latest()", "checkpoint.save(0)", "checkpoint.wait()"]


# -- steps, retention, what is in the directory


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, max_to_keep=2, w=mr.Variable(0.0)) as checkpoint:
        for step in (5, 9, 10, 100):
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
    for name in ("3", "07", ".saving-4-99"):
        (directory / name).mkdir()
    (directory / "9").symlink_to(outside)
    for name in ("8", "notes.txt"):
        (directory / name).write_text("mine")
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
        assert len(checksums._files(tmp_path / "2")) == 2 and not left.exists()
    (tmp_path / "2" / "other").write_text("of nobody")
    with pytest.raises(CheckpointError, match="file other does not belong there"):
        restore(tmp_path, w=w)


def test_a_mark_is_seen_where_it_is(tmp_path: Path, monkeypatch, caplog) -> None:
    """Also when it comes late, and it does not stay."""
    files, elsewhere = _files.StepFiles(tmp_path / "new"), _files.StepFiles(tmp_path / "other")
    slow = threading.Timer(0.2, lambda: (files.root.mkdir(), (files.root / "mark").touch()))
    slow.start()
    assert files.sees("mark")
    slow.join()
    (files.root / "mark").unlink()
    monkeypatch.setattr(_files, "_SEEN_SECONDS", 0.1)
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


def test_names_and_arguments_are_checked(tmp_path: Path) -> None:
    w = mr.Variable(0.0)
    for name in ("../evil", "/abs", ".hidden", "", "a/b", "a\0b", "x" * 129, "ü", "a b", "..", "a\n"):
        with pytest.raises(ValueError, match="will not do; expected 1 to 128"):
            Checkpoint(tmp_path, **{name: w})
    (tmp_path / "file").write_text("")
    for name, value, error in [("to_keep", 0, ValueError), ("to_keep", True, TypeError), ("failed_saves", 0, ValueError)]:
        with pytest.raises(error, match="max_"):
            Checkpoint(tmp_path, w=w, **{f"max_{name}": value})
    for directory, error in [(3, TypeError), ("gs://bucket/x", ValueError), ("", TypeError), (tmp_path / "file", ValueError)]:
        with pytest.raises(error, match="directory"):
            Checkpoint(directory, w=w)
    good = {name: mr.Variable(1.0) for name in ("a.b-c_D9", "x" * 128, "directory", "self", "9")}
    with Checkpoint(tmp_path, **good) as checkpoint:
        for step in (-1, 1.5, True, "3", None, 10**18):
            with pytest.raises(TypeError, match="expected an int of at least 0"):
                checkpoint.save(step)
        checkpoint.save(np.int64(3))
        assert checkpoint.restore_latest() == 3
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
    assert not (tmp_path / "new").exists()


def test_inside_a_step_it_is_refused(tmp_path: Path, strategy2: mr.Strategy) -> None:
    with strategy2.scope(), Checkpoint(tmp_path, w=mr.Variable(0.0)) as checkpoint:
        with pytest.raises(mr.ContextError, match="inside a step"):
            strategy2.run(lambda: checkpoint.save(1))
        with pytest.raises(mr.ContextError, match="inside a step"):
            jax.jit(lambda: checkpoint.restore_latest())()
    assert checkpoint.steps() == []


# -- what does not fit


def test_all_differences_are_listed_before_anything_changes(tmp_path: Path) -> None:
    strategy = on(2)
    with strategy.scope(), iter(strategy.distribute_dataset([np.arange(2)])) as iterator:
        old = {"a": mr.Variable(1.0), "b": mr.Variable([1.0, 2.0]), "c": mr.Variable(1), "d": 3, "gone": mr.Variable(0.0)}
        save(tmp_path, 1, state=old, key={"k": jax.random.key(0)}, data=iterator)
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


def test_what_does_not_fit_another_worker_is_restored_on_none(tmp_path: Path, strategy2: mr.Strategy, monkeypatch) -> None:
    w = mr.Variable(1.0)
    with iter(strategy2.distribute_dataset([np.arange(2) + k for k in range(4)])) as iterator:
        save(tmp_path, 3, w=w, data=iterator)
        next(iterator), w.assign(5.0)
        for key, told, message in [
            ("id", ["2020-02-02T00:00:00Z", "0"], r"\(worker 0\) holds a step 3 of .*\(worker 1\) holds a step 3 of 2020-02-02"),
            ("is_too_much", True, "nothing has changed:\n  it does not fit"),
        ]:
            other = {key: told} | ({"problems": ["it does not fit"]} if key == "is_too_much" else {})
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
        ({"w": w, "extra": mr.Variable(0.0)}, r"extra \(mirrored float32\[\]\) is not in the checkpoint"),
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
    with pytest.raises(TypeError, match="partial is 1; expected True or False"), Checkpoint(tmp_path, w=w) as checkpoint:
        checkpoint.restore_latest(partial=1)


def test_a_checkpoint_of_a_later_format_is_not_taken_for_damage(tmp_path: Path, monkeypatch) -> None:
    w = mr.Variable(1.0)
    monkeypatch.setattr(_files, "FORMAT", 3)
    save(tmp_path, 1, w=w)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 3, and this version.*written by.*install that version"):
        restore(tmp_path, w=w)


@pytest.fixture
def format_1(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """Steps 1 and 2 of two replicas, as they were written until 2026-11, and what they are restored into."""
    shutil.unpack_archive(Path(__file__).with_name("format_1.zip"), tmp_path / "old")
    names = "bool int32 float32 bfloat16 int4 float8_e4m3fn complex64"
    dtypes = [np.dtype(getattr(ml_dtypes, name, name)) for name in names.split()]
    state = {"epoch": 0, "empty": np.ones((0, 3), np.int32), "wide": np.zeros(4), "key": jax.random.key(0)}
    seen = mr.Variable(np.zeros(2, np.float32), synchronization="on_read", aggregation="sum")
    variables = {dtype.name: mr.Variable(np.zeros((1, 3), dtype)) for dtype in dtypes}
    return tmp_path / "old", {"v": variables, "seen": seen, "key": mr.Variable(jax.random.key(0)), "state": state}


def test_steps_that_orbax_wrote_are_restored_and_the_next_one_needs_it_no_more(format_1, monkeypatch, caplog) -> None:
    directory, named = format_1
    with Checkpoint(directory, **named) as checkpoint:
        assert checkpoint.restore_latest() == 2
        for name, variable in named["v"].items():
            expected = np.array([[0, 1, 1]]).astype(variable.dtype) * (2 if name == "float32" else 1)
            assert variable.numpy().tobytes() == expected.astype(variable.dtype).tobytes(), name
        assert named["seen"].numpy().tolist() == [3.0, 6.0] and named["state"]["wide"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert named["state"]["epoch"] == 4 and named["state"]["empty"].shape == (0, 3)
        for key, number in ((named["key"].value, 7), (named["state"]["key"], 1)):
            assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(number)))
        monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
        with pytest.raises(CheckpointError, match=r"step 2 could not .* an earlier version.*pip install orbax-checkpoint"):
            checkpoint.restore_latest()
        checkpoint.save(3)
        named["state"]["epoch"] = 0
        assert checkpoint.restore_latest() == 3 and named["state"]["epoch"] == 4 and not caplog.records


def test_damage_to_steps_that_orbax_wrote_is_found(format_1, caplog) -> None:
    directory, named = format_1
    flip(max(files_of(directory / "2" / "arrays"), key=lambda path: path.stat().st_size), 2000)
    assert restore(directory, **named) == 1 and named["state"]["epoch"] == 3
    assert "step 2" in caplog.text and "is damaged: its CRC-32" in caplog.text
    shutil.rmtree(directory / "1" / "arrays" / "d")
    with pytest.raises(CheckpointError, match=r"(?s)no step in .* is undamaged:.*step 1: file arrays/d/\w+ is missing"):
        restore(directory, **named)


def test_what_the_last_step_finds_wrong_is_never_saved(tmp_path: Path, strategy2: mr.Strategy) -> None:
    def differs(_: object) -> None:
        raise mr.ReplicasDivergeError("the argument `x` is not the same on all workers")

    with strategy2.scope():
        w = mr.Variable(0.0)
    with Checkpoint(tmp_path, w=w) as checkpoint:
        in_flight.joined(jnp.zeros(()), differs)
        with pytest.raises(mr.ReplicasDivergeError, match="argument `x`"):
            checkpoint.save(1)
        assert checkpoint.steps() == []


def test_copies_that_differ_are_never_saved(tmp_path: Path, strategy2: mr.Strategy) -> None:
    with strategy2.scope():
        w, other = mr.Variable(np.zeros(3, np.float32), name="w"), mr.Variable(0.0, name="other")
        with Checkpoint(tmp_path, w=w) as checkpoint:
            good = w._array
            for variable, number in ((w, 1), (other, 2)):
                shards = [jax.device_put(variable.numpy() + i, device) for i, device in enumerate(strategy2.devices)]
                sharding = variable._array.sharding
                variable._array = jax.make_array_from_single_device_arrays(variable.shape, sharding, shards)
                if variable is w:
                    with pytest.raises(mr.ReplicasDivergeError, match="copies of variable 'w' differ"):
                        checkpoint.save(number)
                    assert checkpoint.wait() is None
                    w._array = good
                checkpoint.save(number)  # the second does not hold `other`
                assert checkpoint.wait() == number


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
        found = restore(directory, **named)
        path.write_bytes(originals[path])
        if found == 2:
            assert path.name == "record.json" and named["w"].numpy().tobytes() == newest.tobytes()
        else:
            [error] = errors_of(caplog)
            assert found == 1 and f"step 2 in {directory} is damaged and is not used" in error, (path, error)
            assert path.name == "record.json" or f"file {path.relative_to(directory / '2')} is damaged: its CRC-32" in error
            assert named["w"].numpy().tobytes() == (newest / 2).tobytes()


def test_flipped_bits_are_found_and_the_step_before_is_used(tmp_path: Path, caplog) -> None:
    flips(tmp_path, 30, caplog)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_saves_lose_nothing_that_was_committed() -> None:
    script = Path(__file__).parents[1] / "chaos_saves.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([sys.executable, script, "20"], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundreds_of_flipped_bits_are_found(tmp_path: Path, caplog) -> None:
    flips(tmp_path, 300, caplog)


def test_other_damage_is_found(tmp_path: Path, caplog) -> None:
    named = trained(tmp_path / "sound")
    data, record = Path("2", "arrays.npz"), Path("2", "record.json")
    for number, (victim, harm) in enumerate(
        [
            (data, lambda path: os.truncate(path, path.stat().st_size - 1)),
            (data, lambda path: os.truncate(path, 0)),
            (data, Path.unlink),
            (Path("2", "zz"), Path.touch),
            (Path("2", "folder", "zz"), lambda path: (path.parent.mkdir(), path.touch())),
            (data, lambda path: path.symlink_to(path.rename(tmp_path / "moved"))),
            (record, Path.unlink),
            (record, lambda path: (path.unlink(), path.mkdir())),
            (record, lambda path: (path.unlink(), os.mknod(path, stat.S_IFSOCK | 0o600))),
        ]
    ):
        shutil.copytree(tmp_path / "sound", tmp_path / str(number))
        harm(tmp_path / str(number) / victim)
        caplog.clear()
        assert restore(tmp_path / str(number), **named) == 1, number
        assert [victim.name in error for error in errors_of(caplog)] == [True], number


def test_nothing_is_opened_that_is_not_a_file_as_it_was_written(tmp_path: Path, monkeypatch, caplog) -> None:
    """A FIFO would let it wait, and a link to /dev/zero read, for ever."""
    named = trained(tmp_path / "sound")
    every = [path.relative_to(tmp_path / "sound") for path in files_of(tmp_path / "sound" / "2")]
    harms: dict[str, Callable[[Path], object]] = {
        "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
        "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        "folder": lambda path: (path.unlink(), path.mkdir(), (path / "a").touch()),
        "huge": lambda path: os.truncate(path, 2**40),
    }
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **named: (opened.append(str(path)), real(path, *more, **named))[1])
    more = Path("2", "more")  # that nobody has written
    for victim in [more, *every]:
        for harm, change in harms.items():
            directory = shutil.copytree(tmp_path / "sound", tmp_path / f"{harm}-{'-'.join(victim.parts)}", symlinks=True)
            (directory / more).write_bytes(b"") if victim == more else None
            change(directory / victim)
            caplog.clear()
            opened.clear()
            with monkeypatch.context() as patch:
                patch.setattr(_files, "_read_arrays", lambda path, wanted, real=_files._read_arrays: (
                    opened.append(f"arrays {path.parent.name}"), real(path, wanted))[1])  # fmt: skip
                assert restore(directory, **named) == 1
            assert [victim.name in error for error in errors_of(caplog)] == [True]
            assert "arrays 2" not in opened and "arrays 1" in opened
            assert str(directory / victim) not in opened or harm == "huge" or victim.name == "record.json"
    (tmp_path / "moved").mkdir()
    (tmp_path / "sound" / "2" / "folder").symlink_to(tmp_path / "moved")  # a link to a folder is no folder
    assert restore(tmp_path / "sound", **named) == 1


def test_a_file_that_grows_or_changes_its_kind_while_it_is_looked_at_is_read_no_further(tmp_path: Path, monkeypatch) -> None:
    growing = tmp_path / "growing"
    growing.write_bytes(b"1234")
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 4)
    status, chunks = os.fstat, itertools.repeat(b"5678")

    class Growing(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            return next(chunks)

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "open", lambda path, mode, opener: Growing(path), raising=False)
        assert checksums.file_checksum(growing)[0] == 8, "longer than it was, and not without end"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda number: os.stat_result([stat.S_IFIFO, *status(number)[1:]]))
        assert checksums.file_checksum(growing) == [-1, 0]
    assert checksums.file_checksum(growing, 4) == [4, zlib.crc32(b"1234")]
    assert checksums.file_checksum(growing, 5) == [4, 0]


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
            (checksums, "decode_record", "", OSError(errno.EIO, "input/output"), "2/record.json"),
            (checksums, "_files", "2", OSError(errno.EACCES, "denied", "saved/2"), "saved/2"),
            (checksums, "file_checksum", "arrays.npz", OSError(errno.ESTALE, "stale"), "2/arrays.npz"),
            (_files, "_read_arrays", "arrays.npz", OSError(errno.ENFILE, "too many"), "2/arrays.npz"),
            (_files, "_read_arrays", "arrays.npz", MemoryError("no memory"), "2/arrays.npz"),
        ]
    ):
        directory = shutil.copytree(tmp_path / "saved", tmp_path / str(number))
        before = {path: path.read_bytes() for path in files_of(directory)}
        with Checkpoint(directory, max_to_keep=2, **named) as checkpoint, monkeypatch.context() as patch:
            if name == "decode_record":  # as from `file.read()`, which names no file
                patch.setattr(owner, name, lambda data, error=error: (_ for _ in ()).throw(error))
            else:
                refuse(patch, owner, name, refused, error)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.restore_latest()
        text = str(caught.value)
        assert str(error).partition(":")[0] in text and shown in text and "nothing was restored or removed" in text
        assert f"mv {directory}/2 {directory}/unread-2" in text and "damaged" not in text + caplog.text
        assert {path: path.read_bytes() for path in files_of(directory)} == before and not named["w"].numpy().any()
    assert restore(directory, **named) == 2 and named["w"].numpy().any(), "and it can be run again"
    (directory / "2").rename(directory / "unread-2")  # the way to go on that the message names
    assert restore(directory, **named) == 1


def test_a_step_that_another_process_removes_is_none_or_says_so(tmp_path: Path, monkeypatch) -> None:
    named = trained(tmp_path)
    listdir = os.listdir

    def listed(path: str = ".") -> list[str]:
        if os.path.basename(path) == "1":
            shutil.rmtree(path)
        return listdir(path)

    def removed(*_: object) -> None:
        shutil.rmtree(tmp_path / "2")
        raise FileNotFoundError("no such file")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", listed)
        assert _files.StepFiles(tmp_path).look() == ([2], [])
    monkeypatch.setattr(_files, "_read_arrays", removed)
    with pytest.raises(CheckpointError, match=r"step 2 was removed while it was read, by another process .*max_to_keep"):
        restore(tmp_path, **named)


def test_a_damaged_step_is_damaged_also_where_not_all_of_it_can_be_read(format_1, monkeypatch, caplog) -> None:
    directory, named = format_1
    flip(directory / "2" / "arrays" / "_METADATA", 9)
    other = max(files_of(directory / "2" / "arrays" / "d"), key=lambda p: p.stat().st_size)
    refuse(monkeypatch, checksums, "file_checksum", other.name, OSError(errno.EIO, "Input/output error"))
    assert restore(directory, **named) == 1
    assert "file arrays/_METADATA is damaged" in caplog.text and "missing" not in caplog.text


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


def test_a_step_that_cannot_be_read_back_while_it_is_written_does_not_count(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path)
    with Checkpoint(tmp_path, **named) as checkpoint:
        with monkeypatch.context() as patch:
            refuse(patch, checksums, "file_checksum", "arrays.npz", OSError(errno.EMFILE, "Too many open files"))
            checkpoint.save(3)
            assert checkpoint.wait() == 2 and "saving step 3" in caplog.text
        checkpoint.save(4)
    assert restore(tmp_path, **named) == 4


def test_a_record_that_is_no_record_is_damage(tmp_path: Path, monkeypatch) -> None:
    named = trained(tmp_path, steps=1)
    record = tmp_path / "1" / "record.json"

    def cannot_be_used(why: str = "") -> None:
        with pytest.raises(
            CheckpointError, match=rf"no step in .* is undamaged:\n  step 1: file record.json cannot be used.*{why}"
        ):
            restore(tmp_path, **named)

    good = record.read_bytes()
    changed = json.loads(good)
    changed["record"]["step"] = 2
    for data in (b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100000, json.dumps(changed).encode(), good[:-3]):
        record.write_bytes(data)
        cannot_be_used()
    record.write_bytes(good)
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "MAX_RECORD_BYTES", len(good) - 1)
        cannot_be_used("not a file of at most")
    assert restore(tmp_path, **named) == 1
    record.symlink_to(record.rename(tmp_path / "elsewhere"))
    cannot_be_used("symbolic link")
    record.unlink()
    os.mkfifo(record)
    cannot_be_used("not a file of at most")


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


def test_wrong_arrays_in_whole_files_are_found(tmp_path: Path, monkeypatch, caplog) -> None:
    named = trained(tmp_path)
    monkeypatch.setattr(_files, "_in_numpys_dtype", lambda a: a + 1 if a.shape == (40, 50) else a)
    save(tmp_path, 3, **named)
    monkeypatch.undo()
    assert restore(tmp_path, **named) == 2
    assert "step 3" in caplog.text and "array w is damaged: its CRC-32 is not the one that was written" in caplog.text


def test_when_no_step_is_good_all_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    named = trained(tmp_path)
    for step in "12":
        flip(tmp_path / step / "arrays.npz", 9)
    named["w"].assign(np.zeros((40, 50), np.float32))
    with pytest.raises(CheckpointError, match=r"(?s)no step in .* is undamaged:\n  step 2: .*\n  step 1: .*arrays.npz"):
        restore(tmp_path, **named)
    assert not named["w"].numpy().any()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_damaged_steps_make_room_for_new_ones(tmp_path: Path, monkeypatch, caplog) -> None:
    w = mr.Variable(0.0)
    with Checkpoint(tmp_path, max_to_keep=2, w=w) as checkpoint:
        for step in (20, 30):
            w.assign(float(step))
            checkpoint.save(step)
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
    flip(tmp_path / "25" / "record.json", 50)  # and it cannot be removed
    refuse(monkeypatch, os, "rename", "25", PermissionError(13, "Permission denied"))
    with Checkpoint(tmp_path, w=w) as checkpoint:
        assert checkpoint.restore_latest() == 20
        for step in (21, 22):
            checkpoint.save(step)
            assert checkpoint.wait() == step, "it does not count all the same"
    assert "step 25" in caplog.text and "could not be removed" in caplog.text


# -- writes that fail


def test_failed_saves_are_logged_and_too_many_end_training(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    w = mr.Variable(1.0)
    with Checkpoint(tmp_path, max_failed_saves=2, w=w) as checkpoint:
        checkpoint.save(1)
        assert checkpoint.wait() == 1
        monkeypatch.setattr(_files, "_synced", full)
        checkpoint.save(2)
        assert checkpoint.wait() == 1
        [error] = errors_of(caplog)
        assert "saving step 2" in error and "No space left on device" in error and "the last step there is 1" in error
        monkeypatch.undo()
        checkpoint.save(3)
        assert checkpoint.wait() == 3
        monkeypatch.setattr(_files, "_synced", full)
        checkpoint.save(4)
        checkpoint.save(5)
        with pytest.raises(CheckpointError, match=r"failed 2 times in a row: step 4: OSError.*; step 5: .*last step there is 3"):
            checkpoint.save(6)
        monkeypatch.undo()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["1", "3"]


def test_a_directory_that_vanishes_is_made_again_and_said(tmp_path: Path, caplog) -> None:
    w, where = mr.Variable(1.0), tmp_path / "steps"
    checkpoint = mr.Checkpoint(where, w=w)
    checkpoint.save(1)
    assert checkpoint.wait() == 1 and not caplog.records
    shutil.rmtree(where)
    checkpoint.save(2)
    assert checkpoint.wait() == 2
    [said] = [entry.getMessage() for entry in caplog.records]
    assert said == f"{where} has vanished since the last save, with the steps in it. It is made again."
    checkpoint.close()


def test_a_last_save_that_failed_is_an_error_at_the_end(tmp_path: Path, monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(_files, "_synced", broken)
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
        errors = errors_of(caplog)
        assert len(errors) == 2 and all("space" in error for error in errors), errors
        assert checkpoint.restore_latest() == 1
        assert sorted(p.name for p in tiny_disk.iterdir()) == [".writer", "1", "filler"]
        filler.unlink()
        checkpoint.save(4)
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
    with Checkpoint(tmp_path, max_to_keep=1, max_failed_saves=2, w=mr.Variable(9.0)) as checkpoint:
        assert checkpoint.steps() == [] and checkpoint.restore_latest() is None
        assert "2 was not written by mr.Checkpoint" in caplog.text
        checkpoint.save(2)
        assert checkpoint.wait() is None and "saving step 2 to" in caplog.text
        for step in (10, 20):
            checkpoint.save(step)
    assert (tmp_path / "2" / "notes.txt").read_text() == "mine"
    w = mr.Variable(5.0)
    assert restore(tmp_path / "1", w=w) == 7 and float(w) == 1.0


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
    monkeypatch.setattr(_files.StepFiles, "write", lambda *args: (seen.append(time.sleep(0.3)), write(*args))[1])
    w, v = mr.Variable(5.0), mr.Variable(6.0)
    with Checkpoint(tmp_path, w=w) as first, Checkpoint(tmp_path, v=v) as second:
        first.save(3)
        for step in (2, 3):
            with pytest.raises(ValueError, match=rf"save\({step}\), but .* holds step 3, which this program has not come from"):
                second.save(step)
        first.save(4)
        w.assign(0.0)
        assert restore(tmp_path, w=w) == 4 and float(w) == 5.0 and seen == [None] * 2


def test_workers_that_differ_are_told_how() -> None:
    same_on_workers.require_same_call(["save", "save"])
    same_on_workers.require_same_kinds([{"w": "number"}] * 2)
    for check, told, message in (
        ("require_same_call", ["wait", "save"], r"different methods of a checkpoint: worker 0 wait, worker 1 save\. All must"),
        ("require_same_step", [{"step": 3}, {"step": 4}], r"save different steps: \[3, 4\]\. All must save the same step"),
        ("require_same_kinds", [{"w": "number"}, {"w": "iterator"}], "w is iterator on worker 1, and number on worker 0. Give"),
        ("require_same_kinds", [{"w": "number"}, {}], "w is not there on worker 1, and number on worker 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            getattr(same_on_workers, check)(told)


def test_what_other_workers_say_is_escaped_and_cut() -> None:
    evil = "first\x1b[2J" + "x" * 300_000 + "\nCRITICAL all is well\x07"
    for sentence in (
        lambda: same_on_workers.require_no_error([{"error": evil}, {}], "save"),
        lambda: same_on_workers.require_seen([{"where": "here", "sees": True}, {"where": evil, "sees": False}]),
        lambda: same_on_workers.require_shared([{"where": "a", "x": 1}, {"where": evil, "x": 2}], "x", str),
    ):
        with pytest.raises(CheckpointError) as caught:
            sentence()
        text = str(caught.value)
        assert "first\\x1b[2J" in text and "\n  | CRITICAL all is well\\x07" in text and len(text) < 10_000
    assert "\x1b" not in same_on_workers.by_first_worker([[], [evil]])[0]


def test_the_record_is_json_that_says_what_is_there(tmp_path: Path) -> None:
    strategy = on(2)
    with strategy.scope(), iter(strategy.distribute_dataset([np.arange(4)] * 3)) as iterator:
        next(iterator)
        save(tmp_path, 3, w=mr.Variable(1.0), data=iterator)
    record = checksums.decode_record((tmp_path / "3" / "record.json").read_bytes())
    assert (record["format"], record["step"], record["num_replicas"], record["num_workers"]) == (2, 3, 2, 1)
    assert record["versions"]["jax"] == jax.__version__ and record["leaves"]["data"]["by_worker"][0]["version"] == 1
    assert record["leaves"]["w"]["kind"] == "mirrored"


def test_in_a_notebook_whose_event_loop_runs(tmp_path: Path) -> None:
    async def cell() -> float:
        w = mr.Variable(3.0)
        save(tmp_path, 1, w=w)
        w.assign(0.0)
        assert restore(tmp_path, w=w) == 1
        return float(w)

    assert asyncio.run(cell()) == 3.0


# -- the end of a program


def run_slowly_saved(directory: Path, rest: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose saves take half a second longer."""
    code = """
import os, signal, sys, threading, time
import numpy as np
import mirrored as mr
from mirrored._checkpoint import files as _files
from mirrored._workers.progress import progress
w = mr.Variable(np.zeros(100, np.float32))
checkpoint = mr.Checkpoint(sys.argv[1], w=w)
write = _files.StepFiles.write
_files.StepFiles.write = lambda *args: (time.sleep(0.5), write(*args))[1]
"""
    return run_program(code + rest, directory)


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

_files.StepFiles.write = lambda *args: (interrupt(), time.sleep(0.5), write(*args))[2]
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


def test_a_forked_child_ends_whatever_the_other_threads_held(tmp_path: Path) -> None:
    fork = """
checkpoint.save(1)
progress.lock.acquire()
child = os.fork()
if not child:
    sys.exit(3)
progress.lock.release()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_slowly_saved(tmp_path, fork).stdout == "3\n"


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
    done = run_program(f"{KILLED}{recipe}\nprint('END', train_epochs(directory, 3)[1].hex())", directory, kill_at)
    assert done.returncode == (-9 if kill_at else 0), done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if "END" not in line], [line for line in lines if "END" in line]


@pytest.mark.parametrize("kills", slow(((5,),), ((3, 4, 7, 9),)), ids=str)
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
