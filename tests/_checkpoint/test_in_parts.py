"""Checkpoints of state in parts: a piece at a time, for any number of devices, whole or in parts."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import strategy_of

import mirrored as mr
from mirrored._checkpoint import array_files, files
from mirrored._replicas import division

pytestmark = pytest.mark.usefixtures("in_numpy")

rng = np.random.default_rng(0)
VALUE, GRADIENT = rng.normal(size=(12, 20)).astype(np.float32), rng.normal(size=(12, 20)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_arrays_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "LEAST_BYTES", 256)


class Run:
    """A training, whose state is all kinds of what is in parts."""

    def __init__(self, directory: Path, count: int, storage: str) -> None:
        self.strategy = strategy_of(count, storage=storage)
        with self.strategy.scope():
            self.w = mr.Variable(np.zeros_like(VALUE), name="w")
            self.half = mr.Variable(jnp.zeros((20, 21), jnp.bfloat16), name="half")
            self.optimizer = mr.Optimizer(optax.adam(0.1), [self.w])
            self.state = {"bare": jnp.zeros((12, 20)), "host": np.zeros((12, 20), np.float32), "epoch": 0}
            named = {"w": self.w, "half": self.half, "optimizer": self.optimizer, "state": self.state}
            self.checkpoint = mr.Checkpoint(directory, **named)

    def train(self) -> None:
        def step(bare: jax.Array) -> jax.Array:
            self.optimizer.apply_gradients([jnp.asarray(GRADIENT)], aggregate=False)
            self.half.assign_add(jnp.full_like(self.half, 0.5))
            return bare + self.w

        self.state["bare"] = self.strategy.run(step, args=(self.state["bare"],))
        self.state["host"] = np.asarray(self.state["bare"])
        self.state["epoch"] += 1

    def values(self) -> list[np.ndarray]:
        leaves = [self.w.numpy(), self.half.numpy(), *jax.tree.leaves(self.optimizer.state), *self.state.values()]
        return list(map(np.array, leaves))


def saved(directory: Path, count: int, storage: str) -> list[np.ndarray]:
    run = Run(directory, count, storage)
    for step in (1, 2):
        run.train()
        run.checkpoint.save(step)
    run.checkpoint.close()
    return run.values()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "LEAST_BYTES", 256)
        return folder, saved(folder, 4, "parts")


@pytest.fixture
def sound(saved_once: tuple[Path, list[np.ndarray]], tmp_path: Path) -> list[np.ndarray]:
    """Two steps of four devices, in parts, are in the test's folder; return the last values."""
    shutil.copytree(saved_once[0], tmp_path, dirs_exist_ok=True)
    return saved_once[1]


@pytest.mark.parametrize(("count", "storage"), [(8, "parts"), pytest.param(3, "whole", marks=pytest.mark.by_xla)], ids=str)
def test_any_storage_on_any_number_of_devices_is_restored_on_any_other(tmp_path: Path, count: int, storage: str) -> None:
    expected = saved(tmp_path, count, storage)
    record = json.loads((tmp_path / "2" / "record.json").read_text())["record"]
    assert record["format"] == (files.FORMAT_IN_PARTS if storage == "parts" else files.FORMAT)
    assert (tmp_path / "2" / "parts-0.npz").exists() == (storage == "parts")
    for others, way in [(1, "parts"), (2, "whole"), (3, "parts"), (8, "parts")]:
        run = Run(tmp_path, others, way)
        placements = [run.w._slot.array.sharding, run.half._slot.array.sharding]
        assert run.checkpoint.restore_latest() == 2
        assert [run.w._slot.array.sharding, run.half._slot.array.sharding] == placements
        for own, value in zip(run.values(), expected, strict=True):
            np.testing.assert_array_equal(own, value, strict=True)
        run.train()  # with the same program and donated arrays
        assert run.state["epoch"] == 3
        run.checkpoint.close()


def test_the_host_holds_few_pieces_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until those before are written; also where writing fails."""
    monkeypatch.setattr(array_files, "MAX_HELD_BYTES", 300)
    most, held = 0.0, 0
    put, write = array_files.Pieces.put, np.lib.format.write_array

    def counting(pieces: array_files.Pieces, key: str, array: np.ndarray) -> None:
        nonlocal most
        put(pieces, key, array)
        most = max(most, pieces._held)

    monkeypatch.setattr(array_files.Pieces, "put", counting)
    saved(tmp_path / "sound", 4, "parts")
    assert 240 <= most <= 300

    def failing(file: Any, array: np.ndarray, **options: Any) -> None:
        nonlocal held
        held += 1
        if held == 2:
            raise OSError(28, "No space left on device")
        write(file, array, **options)

    monkeypatch.setattr(np.lib.format, "write_array", failing)
    run = Run(tmp_path / "full", 4, "parts")
    run.train()
    run.checkpoint.save(1)
    with pytest.raises(mr.CheckpointError, match="No space left"):
        run.checkpoint.close()
    assert list((tmp_path / "full").glob("[.0-9]*")) in ([], [tmp_path / "full" / ".writer"])


@pytest.mark.parametrize("damage", ["flip", "missing", "short", "another"])
@pytest.mark.usefixtures("sound")
def test_a_damaged_part_is_found_and_the_step_before_is_restored(tmp_path: Path, damage: str, caplog: Any) -> None:
    path = tmp_path / "2" / "parts-0.npz"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 3] ^= 1
        path.write_bytes(data)
    elif damage == "short":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "missing":
        path.unlink()
    else:
        shutil.copy(tmp_path / "1" / "parts-0.npz", path)
    run = Run(tmp_path, 2, "parts")
    assert run.checkpoint.restore_latest() == 1 and run.state["epoch"] == 1
    assert "step 2 in" in caplog.text and "is damaged and is not used" in caplog.text
    assert ("w is damaged" in caplog.text or "is damaged: its CRC-32" in caplog.text) or damage in ("missing", "short")
    run.checkpoint.close()


@pytest.mark.parametrize(("num_read", "num_lost"), [(0, 0), (8, 1), (19, 2)])
def test_a_disk_that_fails_after_a_step_was_verified_leaves_no_mixture(
    tmp_path: Path, sound: list[np.ndarray], num_read: int, num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is as it was, but variables that had been restored: they are lost until the next restore."""
    read, left = array_files.InFiles._read, num_read
    run = Run(tmp_path, 2, "parts")
    before, mu = dict(run.state), run.optimizer.state[0].mu[0]
    variables = {run.w: np.zeros_like(VALUE), run.half: np.zeros((20, 21)), mu: np.zeros_like(VALUE)}
    variables |= {run.optimizer.iterations: 0, run.optimizer.state[0].count: 0}  # whole ones are not lost

    def failing(*arguments: Any) -> np.ndarray:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(5, "Input/output error")
        return read(*arguments)

    monkeypatch.setattr(array_files.InFiles, "_read", failing)
    with pytest.raises(OSError, match="Input/output error") as raised:
        run.checkpoint.restore_latest()
    told = "".join(getattr(raised.value, "__notes__", []))
    kept = [variable for variable in variables if f"'{variable.name}'" not in told]
    for variable in kept:
        np.testing.assert_array_equal(variable, variables[variable])
    assert len(variables) - len(kept) == num_lost
    if num_lost:
        with pytest.raises(mr.VariableLostError, match=r"is lost: a restore,.* failed \(OSError: .*restore_latest"):
            run.train()
    assert all(run.state[name] is value for name, value in before.items()) and not before["host"].any()
    assert run.checkpoint.restore_latest() == 2
    for own, value in zip(run.values(), sound, strict=True):
        np.testing.assert_array_equal(own, value, strict=True)
    run.checkpoint.close()


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["leaves"]["w"]["parts"].update(count=5),
        lambda record: record["leaves"]["w"]["parts"].update(count=3),
        lambda record: record["leaves"]["w"]["parts"].update(axis="x"),
        lambda record: record["leaves"]["w"]["parts"].update(shape=[20, 12]),
        lambda record: record["arrays"]["p1.0"].update(file="../1/parts-0.npz"),
    ],
)
def test_a_record_that_no_save_writes_is_damage(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "2" / "record.json"
    record = files._decode(path.read_bytes())
    change(record)
    path.write_bytes(files._encode(record))
    run = Run(tmp_path, 2, "parts")
    assert run.checkpoint.restore_latest() == 1 and run.state["epoch"] == 1
    run.checkpoint.close()
