"""A profile has each run as a step and ends in every way; its trace tells computation from communication, or why not."""

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._process import last_profiles
from mirrored._program import program
from mirrored._replicas.spent import COMPUTATION
from mirrored._report import profile as profile_module
from mirrored._report import traced
from mirrored._report.facts import facts_of, load, save
from mirrored._report.page import page
from mirrored._report.traced import Stretch, kind_of, of_device, seconds_of

Event = tuple[str, int, int, dict[str, object]]


def plane(name: str, lines: dict[str, list[Event]]) -> str:
    """Write a plane of a trace, with events (name, start and end in nanoseconds, facts)."""
    events = [event for line in lines.values() for event in line]
    names = sorted({event[0] for event in events})
    facts = sorted({fact for event in events for fact in event[3]})
    text = f'name: "{name}"\n'
    text += "".join(f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}\n' for i, n in enumerate(names, 1))
    text += "".join(f'stat_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}\n' for i, n in enumerate(facts, 1))
    for line, of_line in lines.items():
        text += f'lines {{ name: "{line}"\n'
        for event, start, end, own in of_line:
            stats = [
                f"stats {{ metadata_id: {facts.index(fact) + 1} "
                + (f'str_value: "{value}" }}' if isinstance(value, str) else f"int64_value: {value} }}")
                for fact, value in own.items()
            ]
            number = names.index(event) + 1
            text += f"events {{ metadata_id: {number} offset_ps: {start}000 duration_ps: {end - start}000 {' '.join(stats)} }}\n"
        text += "}\n"
    return f"planes {{ {text} }}\n"


def written(path: Path, *planes: str) -> Path:
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(planes)))
    return path


def on_cpu(name: str, start: int, end: int, device: int, number: int = 0) -> Event:
    return name, start, end, {"hlo_op": name, "device_ordinal": device, "_p": number}


def nanoseconds(path: Path, *devices: int) -> dict[str, int]:
    return {kind: round(seconds * 1e9) for kind, seconds in seconds_of(path, devices).items()}


def test_operations_of_cpus_count_where_they_are_innermost_and_until_they_end(tmp_path: Path) -> None:
    lines = {
        "python": [("$steps.py:64 run", 0, 900, {}), ("PjitFunction(body)", 0, 900, {})],
        "tf_XLA/1": [
            on_cpu("while.9", 0, 100, 0),
            on_cpu("psum.7", 20, 50, 0),
            ("Rendezvous", 30, 50, {}),
            on_cpu("wrapped_tanh", 100, 101, 0, number=7),
        ],
        "tf_XLA/2": [("end: wrapped_tanh", 160, 161, {"_c": 7}), on_cpu("all_gather.1", 10, 30, 1), on_cpu("fusion", 40, 50, 1)],
        "tf_XLA/3": [on_cpu("fusion", 0, 1000, 2)],  # of another strategy
    }
    path = written(tmp_path / "a.xplane.pb", plane("/host:CPU", lines), plane("/host:metadata", {}))
    assert nanoseconds(path, 0) == {COMPUTATION: 70 + 60, "all-reduce": 30}
    assert nanoseconds(path, 0, 1) == {COMPUTATION: 70 + 60 + 10, "all-reduce": 30, "all-gather": 20}


def test_operations_of_gpus_are_those_of_their_streams(tmp_path: Path) -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    lines = {
        "Stream #14(Compute)": [("loop_add_fusion", 0, 40, {"hlo_op": "loop_add_fusion"}), ("MemcpyH2D", 50, 90, {})],
        "Stream #15(Compute)": [(nccl, 30, 70, {"hlo_op": "all-reduce-start.1"}), ("ncclDevKernel_SendRecv(x)", 80, 85, {})],
        "XLA Ops": [("loop_add_fusion", 0, 1000, {})],  # the same once more
        "Steps": [("1", 0, 1000, {})],
    }
    tpu = plane("/device:TPU:1", {"XLA Ops": [("%all-to-all.2 = f32[8] all-to-all(%p)", 0, 9, {}), ("%dot = f32[8]", 9, 12, {})]})
    other = plane("/device:CUSTOM:2", {"XLA Ops": [("%dot = f32[8]", 0, 4, {})]})
    path = written(tmp_path / "a.xplane.pb", plane("/device:GPU:0", lines), tpu, other)
    assert nanoseconds(path, 0) == {COMPUTATION: 30, "all-reduce": 40, "send and receive": 5}
    assert nanoseconds(path, 1) == {COMPUTATION: 3, "all-to-all": 9}
    assert nanoseconds(path, 2) == {COMPUTATION: 4}


def test_kinds_are_those_of_xla_and_of_kernels() -> None:
    kinds = {
        "psum.7 psum_invariant.3.clone pmax all-reduce-done": "all-reduce",
        "all_gather.7": "all-gather",
        "reduce_scatter.7": "reduce-scatter",
        "all-to-all": "all-to-all",
        "ppermute.3 collective-permute-start.1": "collective-permute",
        "psum_add_fusion wrapped_reduce.9 reduce send_data_fusion": COMPUTATION,
    }
    assert [name for names, kind in kinds.items() for name in names.split() if kind_of(name) != kind] == []
    assert kind_of("x", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)") == "reduce-scatter"
    assert kind_of("x", "ncclKernel_AllGather_RING_LL_Sum_int8_t(x)") == "all-gather"


def test_each_moment_counts_for_the_operation_that_began_last() -> None:
    sum_, work = "all-reduce", COMPUTATION
    assert of_device([]) == {}
    assert of_device([Stretch(5, 9, sum_), Stretch(0, 2, work)]) == {sum_: 4, work: 2}
    assert of_device([Stretch(0, 10, sum_), Stretch(3, 6, work)]) == {sum_: 7, work: 3}  # work goes on beside it
    assert of_device([Stretch(0, 5, work), Stretch(3, 8, sum_), Stretch(4, 6, work)]) == {work: 5, sum_: 3}
    assert of_device([Stretch(0, 4, work), Stretch(0, 10, sum_)]) == {sum_: 6, work: 4}  # the inner one began with it


def test_what_cannot_be_read_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bad := tmp_path / "bad.xplane.pb").write_bytes(b"\xff\xff no trace")
    with pytest.raises(ValueError, match="cannot read the trace"):
        seconds_of(bad, [0])
    (empty := tmp_path / "empty.xplane.pb").write_bytes(b"")
    with pytest.raises(ValueError, match="no operations of device 1"):
        seconds_of(empty, [1])
    monkeypatch.setattr(traced, "MAX_BYTES", 3)
    with pytest.raises(ValueError, match="record fewer steps"):
        seconds_of(bad, [0])
    monkeypatch.undo()
    monkeypatch.delattr(jax.profiler, "ProfileData")
    with pytest.raises(ValueError, match="ProfileData"):
        seconds_of(empty, [0])


class Recorder:
    """The profiler of JAX, without its cost: what was begun and ended, in order; it writes these planes as its trace."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.planes: list[str] = []

    def start_trace(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.seen.append(path.name)

    def stop_trace(self) -> None:
        self.seen.append("stopped")
        if self.planes:
            written(self.path / "a.xplane.pb", *self.planes)

    @contextlib.contextmanager
    def mark(self, name: str, step_num: int) -> Iterator[None]:
        self.seen.append((name, step_num))
        yield
        self.seen.append("end")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Put a recorder in the place of JAX's profiler."""
    found = Recorder()
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, getattr(found, name))
    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", found.mark)
    last_profiles.clear()
    yield found
    last_profiles.clear()


def total(x: object) -> object:
    return mr.get_replica_context().all_reduce("sum", x)


def test_explain_and_the_page_show_the_last_profile(strategy2: mr.MirroredStrategy, recorder: Recorder, tmp_path: Path) -> None:
    def profiled() -> str:
        with mr.profile(tmp_path / "p"):
            for _ in range(2):
                strategy2.run(total, args=(np.ones(2),))
        [line] = [line for line in strategy2.explain().splitlines() if "profile of" in line]
        return line.replace(str(tmp_path), "")

    work = [on_cpu("fusion", 0, 71, device) for device in (0, 1)]
    assert "with mr.profile(" in page(facts_of(strategy2)) and "profile" not in strategy2.explain()
    source = "(profile of 2 steps in '/p')"
    assert profiled() == f"the devices' time {source} is unknown: JAX's profiler wrote no trace"
    recorder.planes = [plane("/host:CPU", {"x": work})]
    assert profiled() == f"the devices' time {source} is unknown: the trace names no collective, although the programs have some"
    assert "names no collective" in page(facts_of(strategy2))
    recorder.planes = [plane("/host:CPU", {"x": work[:1]})]
    assert profiled().endswith("is unknown: the trace has no operations of device 1")
    sums = [on_cpu("psum.1", 100, 129, device) for device in (0, 1)]
    recorder.planes = [plane("/host:CPU", {"x": [*work, *sums]})]
    assert profiled() == f"time of the devices {source}: 71% computation, 29% communication (all-reduce)"
    gathers = [on_cpu("all-gather.1", 200, 300, device) for device in (0, 1)]
    recorder.planes = [plane("/host:CPU", {"x": [*work, *sums, *gathers]})]
    assert profiled().endswith(": 36% computation, 64% communication (50% all-gather, 15% all-reduce)")
    facts = facts_of(strategy2)
    assert all(words in page(facts) for words in (">communication<", ">of it all-gather<", ">50%<", "What 2 devices did"))
    save(facts, tmp_path / "facts.json")
    assert load(tmp_path / "facts.json") == facts
    assert "<td>36%</td><td>64%</td>" in page(facts, [facts, facts])
    later = mr.MirroredStrategy(list(strategy2.devices))
    assert "profile of" not in later.explain() and facts_of(later).profiled is None  # it ran nothing of another strategy's


def test_the_last_profile_is_one_that_ended_well_of_the_steps_alone(strategy2, recorder: Recorder, tmp_path) -> None:
    alone = mr.MirroredStrategy(["cpu:5"])
    recorder.planes = [plane("/host:CPU", {"x": [on_cpu("psum.1", 0, 29, 5)]})]
    for _ in range(3):
        alone.run(total, args=(np.ones(2),))
    assert alone._steps.spent.last is not None
    with mr.profile(tmp_path / "p"):
        assert alone._steps.spent.last is None, "the time of the profiler is none between the steps"
        alone.run(total, args=(np.ones(2),))
        alone.run(total, args=(np.ones(2),))
    assert alone._steps.spent.last is None
    assert "100% computation, 0% communication" in alone.explain(), "one replica does not communicate"
    last = last_profiles[alone._mesh]
    with pytest.raises(KeyError), mr.profile(tmp_path / "p"):
        alone.run(total, args=(np.ones(2),))
        raise KeyError
    assert last_profiles[alone._mesh] is last, "a block that fails leaves the last profile"


def test_cpus_have_the_number_of_the_job_and_gpus_that_of_the_process() -> None:
    number = lambda platform: traced.number_of(types.SimpleNamespace(platform=platform, id=2048, local_hardware_id=1))  # noqa: E731
    assert (number("cpu"), number("gpu")) == (2048, 1)  # as traces of two workers have them


def double(x: object) -> object:
    return x * 2


double.__qualname__ = "double"


def test_each_run_is_a_step_with_its_name_and_number(strategy2: mr.MirroredStrategy, recorder: Recorder, tmp_path: Path) -> None:
    function = mr.function(lambda x: strategy2.run(double, args=(x,)))
    strategy2.run(double, args=(np.ones(2),))
    with mr.profile(tmp_path / "p") as path:
        strategy2.run(double, args=(np.ones(2),))
        strategy2.run(double, args=(np.ones(2),))
        function(np.ones(2))
    strategy2.run(double, args=(np.ones(2),))
    assert path == tmp_path / "p"
    name = "test_each_run_is_a_step_with_its_name_and_number.<locals>.<lambda>"
    assert recorder.seen == ["p", ("double", 0), "end", ("double", 1), "end", (name, 0), "end", "stopped"]


def test_the_block_waits_for_programs_whose_results_nobody_has_asked_for(strategy3, monkeypatch, recorder, tmp_path) -> None:
    long = lambda x: jax.lax.fori_loop(0, 80, lambda _, x: jnp.tanh(x @ x), x)  # noqa: E731
    found: list[jax.Array] = []
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: recorder.seen.append([array.is_ready() for array in found]))
    strategy3.run(long, args=(np.ones((200, 200), np.float32),))
    with mr.profile(tmp_path):
        found += [strategy3.run(long, args=(np.ones((200, 200), np.float32),)) for _ in range(3)]
    assert recorder.seen[-1] == [True] * 3


def test_a_profile_ends_when_the_block_fails_and_there_is_one_at_a_time(strategy2, recorder: Recorder, tmp_path) -> None:
    with pytest.raises(ArithmeticError), mr.profile(tmp_path):
        with pytest.raises(RuntimeError, match="already"):
            mr.profile(tmp_path).__enter__()
        strategy2.run(lambda: 1 // 0)
    assert recorder.seen[-1] == "stopped" and program.annotate is None
    [rows] = strategy2.distribute_dataset([np.arange(4.0)])
    with mr.profile(tmp_path):
        result = strategy2.run(double, args=(rows,))
    assert strategy2.gather(result, axis=0).tolist() == [0, 2, 4, 6]


def test_a_worker_writes_into_its_own_folder(strategy2: mr.MirroredStrategy, recorder: Recorder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(profile_module, "joint_strategy", lambda: strategy2)
    with mr.profile(tmp_path) as path:
        pass
    assert path == tmp_path / "worker_0"


@pytest.mark.slow
def test_a_real_trace_tells_heavy_computation_from_heavy_communication(tmp_path: Path) -> None:
    strategy = mr.MirroredStrategy([f"cpu:{number}" for number in range(4)])
    with strategy.scope():
        w = mr.Variable(np.zeros((1000, 1000), "float32"), name="w")

    def compute(x: jax.Array) -> None:
        for _ in range(12):
            x = jnp.tanh(x @ x)
        w.assign_add(jnp.zeros((1000, 1000)) + total(x.sum()))

    def communicate(x: jax.Array) -> None:
        w.assign_add(total(w.value + x[0, 0]))

    def in_loop(x: jax.Array) -> None:
        w.assign(total(jax.lax.fori_loop(0, 4, lambda _, y: total(y) / 4, w.value + x[0, 0])))

    def share(step: object) -> float:
        x = strategy.distribute_values_from_function(lambda context: np.ones((400, 400), "float32"))
        strategy.run(step, args=(x,))
        jax.block_until_ready(w.value)
        with mr.profile(tmp_path / step.__name__) as path:
            for _ in range(5):
                strategy.run(step, args=(x,))
        assert path.exists()
        found = last_profiles[strategy._mesh]
        assert (found.reason, found.num_steps, found.num_devices) == ("", 5, 4) and set(found.kinds()) == {"all-reduce"}
        return found.shares()["communication"]

    assert share(compute) < 0.5 < share(communicate)
    assert share(in_loop) > 0.5
