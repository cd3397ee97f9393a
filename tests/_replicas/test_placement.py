"""One value on all replicas; what crosses between workers is here tried with two processes' rows made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._replicas import placement

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32", "int4", "int2", "uint4"]
DTYPES += ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_an_array_survives_being_sent_as_bits(dtype: str, shape: tuple[int, ...]) -> None:
    host = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=shape) * 3).astype(dtype))
    bits = placement._bits(host)
    assert bits.dtype in (np.uint8, np.uint32)
    again = jax.jit(lambda b: placement._array_of(b, shape, host.dtype))(bits)
    assert again.dtype == host.dtype and again.shape == shape
    assert np.asarray(again).tobytes() == host.tobytes()


@pytest.mark.parametrize("value", [-0.0, np.nan, np.inf, 1e-45])
def test_special_numbers_keep_their_bits(value: float) -> None:
    host = np.array([value], np.float32)
    again = placement._array_of(jnp.asarray(placement._bits(host)), (1,), host.dtype)
    assert np.asarray(again).tobytes() == host.tobytes()


def test_wide_numbers_keep_their_bits() -> None:
    with jax.enable_x64(True):
        for host in (np.array([1 / 3, -0.0]), np.array([2**60 + 1]), np.array([1 / 3 + 1j])):
            again = placement._array_of(jnp.asarray(placement._bits(host)), host.shape, host.dtype)
            assert again.dtype == host.dtype and np.asarray(again).tobytes() == host.tobytes()


def test_with_one_worker_arrays_are_moved_and_mirrored_ones_stay(strategy3) -> None:
    mesh = strategy3._mesh
    own, host = strategy3.reduce("sum", 1.0), np.arange(3.0)
    placed = placement.mirror(mesh, [own, host, jax.random.key(0)])
    assert placed[0] is own
    assert all(array.sharding == mesh.mirrored for array in placed)
    assert placement.stack(mesh, np.ones((3, 2), np.float32)).sharding == mesh.stacked


def test_workers_that_differ_are_named(strategy3) -> None:
    seen = []
    sums = jnp.array([[1, 2], [1, 2], [1, 3]], jnp.uint32)
    placement._compare(strategy3._mesh, [4, 7], lambda position, workers: seen.append((position, list(workers))), sums)
    assert seen == [(7, [0])]  # the third replica is process 0's here
    with pytest.raises(mr.ReplicasDivergeError, match=r"the argument x, is not the same on all workers: workers 1, 2 gave other"):
        placement.refuse_argument("the argument x", 0, [1, 2])
    with pytest.raises(mr.ReplicasDivergeError, match=r"closes over \(number 3 of them\).*: worker 1 made other values"):
        placement.refuse_constant(3, [1])


def test_an_array_that_the_workers_computed_otherwise_is_named(strategy3, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {2: strategy3.reduce("sum", 1.0), 5: strategy3.reduce("sum", 2.0)}
    monkeypatch.setattr(placement.joint_programs, "exchange", lambda name, row: [row, row, [row[0], row[1] + 1]])
    with pytest.raises(mr.ReplicasDivergeError, match=r"what `v5` was given is an array .* worker 2 computed other values"):
        placement._compare_bits(arrays, lambda index: f"what `v{index}` was given")
    arrays[5].delete()
    with pytest.raises(mr.ReplicasDivergeError, match=r"what `v5` was given"):
        placement._compare_bits(arrays, lambda index: f"what `v{index}` was given")
    monkeypatch.setattr(placement.joint_programs, "exchange", lambda name, row: [row] * 3)
    placement._compare_bits(arrays, lambda index: f"what `v{index}` was given")
    placement.check_later(strategy3._mesh, [arrays[2]], lambda _: "with one worker there is nothing to compare")


def test_workers_agree_on_what_is_sent_before_it_is_compiled(strategy3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable is made without any step, so nothing else finds that it has another shape on another worker."""
    said = []

    def differ(name: str, text: str) -> None:
        said.append(text)
        raise mr.ProgramMismatchError("different programs")

    monkeypatch.setattr(placement.joint_programs, "agree", differ)
    with pytest.raises(mr.ProgramMismatchError):
        placement._program(strategy3._mesh, (((2, 3), np.dtype("float32")), ((), np.dtype("int32"))))
    rows = jax.device_put(np.ones((3, 2), np.float32), strategy3._mesh.stacked)
    with pytest.raises(mr.ProgramMismatchError):
        placement._mirrored_again(strategy3._mesh, rows)
    assert said == ["float32[2, 3]\nint32[]", f"mirroring an array from {rows.sharding} of float32[3, 2]"]
    with pytest.raises(mr.StrategyMismatchError, match=r"an array of shape \(3, 2\) lies on devices of several workers which"):
        placement._mirrored_again(mr.MirroredStrategy(["cpu:4", "cpu:5"])._mesh, rows)


def test_what_is_mirrored_again_is_waited_for_like_any_program(strategy3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the guard would take this worker for one that waits, until its next program."""
    joined = []
    monkeypatch.setattr(placement.joint_programs, "agreed", lambda name, text, program: program)
    monkeypatch.setattr(placement.in_flight, "joined", joined.append)
    placement._gathering.cache_clear()
    rows = jax.device_put(np.arange(6.0).reshape(3, 2), strategy3._mesh.stacked)
    [array] = [placement._mirrored_again(strategy3._mesh, rows)]
    placement._gathering.cache_clear()
    assert joined == [array] and array.sharding == strategy3._mesh.mirrored and (np.asarray(array) == np.asarray(rows)).all()


def test_another_name_of_the_placement_costs_no_program(strategy3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_gathering", None)
    array = jax.device_put(
        np.ones((2, 2)), jax.sharding.NamedSharding(strategy3._mesh.mesh, jax.sharding.PartitionSpec(None, None))
    )
    again = placement._mirrored_again(strategy3._mesh, array)
    assert again.sharding == strategy3._mesh.mirrored and (np.asarray(again) == 1).all()
