"""One value on all replicas; what crosses between workers is here tried with two processes' rows made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._replicas import cross_replica, in_flight, placement
from mirrored._replicas.placement import checksum

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32", "int4", "int2", "uint4"]
DTYPES += ["float16", "bfloat16", "float32", "complex64", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]


def test_an_array_survives_being_sent_as_bits() -> None:
    numbers = np.random.default_rng(0).uniform(0, 3, size=(2, 3))
    hosts = [numbers.astype(jnp.dtype(dtype)) for dtype in DTYPES]
    hosts += [host[:, :0] for host in hosts] + [host[1, 1] for host in hosts]
    hosts.append(np.float32([-0.0, np.nan, np.inf, 1e-45]))
    bits = [placement._bits(host) for host in hosts]
    assert all(one.dtype in (np.uint8, np.uint32) for one in bits)
    again = jax.jit(lambda bits: [placement._array_of(b, h.shape, h.dtype) for b, h in zip(bits, hosts, strict=True)])(bits)
    with jax.enable_x64(True):
        wide = [np.array([1 / 3, -0.0]), np.array([2**60 + 1]), np.array([1 / 3 + 1j])]
        again += [placement._array_of(jnp.asarray(placement._bits(host)), host.shape, host.dtype) for host in wide]
    for host, array in zip(hosts + wide, again, strict=True):
        assert array.dtype == host.dtype and array.shape == host.shape
        assert np.asarray(array).tobytes() == host.tobytes(), host


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
    compare = lambda: placement._compare_bits(arrays, lambda index: f"what `v{index}` was given")  # noqa: E731
    for change in (lambda: None, arrays[5].delete):  # a user may have given it away meanwhile, on all workers
        change()
        with pytest.raises(mr.ReplicasDivergeError, match=r"what `v5` was given is an array .* worker 2 computed other values"):
            compare()
    monkeypatch.setattr(placement.joint_programs, "exchange", lambda name, row: [row] * 3)
    compare()
    placement.check_later(strategy3._mesh, [arrays[2]], lambda _: "with one worker there is nothing to compare")


def test_an_array_of_another_placement_is_mirrored_by_a_program_of_all_workers(strategy3, monkeypatch) -> None:
    """It is waited for like any program: else the guard would take this worker for one that waits, until its next program."""
    joined, mesh = [], strategy3._mesh
    rows = jax.device_put(np.arange(6.0, dtype=np.float32).reshape(3, 2), mesh.stacked)
    monkeypatch.setattr(in_flight, "is_joint", lambda placement: True)
    monkeypatch.setattr(in_flight, "joined", joined.append)
    monkeypatch.setattr(cross_replica.joint_programs, "agreed", lambda name, text, program: program)
    cross_replica._compile.cache_clear()
    array = placement._mirrored_again(mesh, rows)
    cross_replica._compile.cache_clear()
    assert joined == [array]
    monkeypatch.setattr(cross_replica, "compiled", None)  # another name of the placement costs no program
    named = jax.device_put(rows, jax.sharding.NamedSharding(mesh.mesh, jax.sharding.PartitionSpec(None, None)))
    for again in (array, placement._mirrored_again(mesh, named)):
        assert again.sharding == mesh.mirrored and (np.asarray(again) == np.asarray(rows)).all()
    with pytest.raises(mr.StrategyMismatchError, match=r"an array of shape \(3, 2\) lies on devices of several workers which"):
        placement._mirrored_again(mr.MirroredStrategy(["cpu:4", "cpu:5"])._mesh, rows)


# -- checksums


def test_a_changed_element_of_any_dtype_is_found() -> None:
    for dtype in DTYPES[:-2]:
        flat = (np.arange(12) % 2).astype(jnp.dtype(dtype))
        array = flat.reshape(3, 4)
        for index in range(12):
            changed = flat.copy()
            changed[index] = flat[index] == 0
            assert checksum(changed.reshape(3, 4)) != checksum(array), (dtype, index)
        assert checksum(array) == checksum(jax.device_put(array))
    assert checksum(np.array([0.0])) != checksum(np.array([-0.0]))
    assert checksum(np.array([np.nan])) == checksum(np.array([np.nan]))
    assert checksum(np.zeros((0,))) == checksum(np.zeros((0,)))
    key, seen = jax.random.key(3), []
    jax.jit(lambda x: (seen.append(checksum(key)), x)[1])(1.0)
    assert seen == [checksum(key)] != [checksum(jax.random.key(0))], "of a key, also while a program is traced"


def test_with_one_worker_arrays_are_moved_and_mirrored_ones_stay(strategy3) -> None:
    mesh = strategy3._mesh
    own, host = strategy3.reduce("sum", 1.0), np.arange(3.0)
    placed = placement.mirror(mesh, [own, host, jax.random.key(0)])
    assert placed[0] is own
    assert all(array.sharding == mesh.mirrored for array in placed)
    assert placement.stack(mesh, np.ones((3, 2), np.float32)).sharding == mesh.stacked
