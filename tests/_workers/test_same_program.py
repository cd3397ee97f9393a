"""Workers compare what they run: the same programs pass, each kind of difference is shown, on every worker, with both sides."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import pytest
from fake_service import FakeClient

from mirrored._errors import ProgramMismatchError
from mirrored._workers.coordination import Coordination
from mirrored._workers.progress import UNKNOWN, BatchPlace, Progress
from mirrored._workers.same_program import Agreement, digest, other_order, require_same_history


class Job:
    """Workers that are threads."""

    def __init__(self, num_workers: int) -> None:
        self.client = FakeClient()
        self.progress = [Progress() for _ in range(num_workers)]
        self.workers = [Coordination(self.client, worker, num_workers) for worker in range(num_workers)]
        self.agreements = [Agreement(*pair) for pair in zip(self.workers, self.progress, strict=True)]

    def run(self, work: Callable[[int, Agreement], object]) -> list[object]:
        """Do the work of each worker; return its result, or its ProgramMismatchError."""

        def guarded(worker: int) -> object:
            try:
                return work(worker, self.agreements[worker])
            except ProgramMismatchError as error:
                return error

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(guarded, range(len(self.workers))))


def lowered(function: Callable, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> str:
    return jax.jit(function).lower(jax.ShapeDtypeStruct(shape, dtype)).as_text()


def check(agreement: Agreement, name: str, text: str) -> None:
    agreement.check(name, text, digest(text).encode(), "job.py:7")


TRAIN, EVALUATE = ("train", lowered(jnp.sum)), ("evaluate", lowered(lambda x: (x * x).mean()))


def trail(*names: str) -> str:
    """What a worker tells that has run programs of these names."""
    progress = Progress()
    for name in names:
        progress.enter(name, name.encode())
    return progress.trail.encode()


def test_histories_that_are_the_same_or_not_known_pass_and_others_are_told() -> None:
    ours = ["3", "ab12"]
    trails = MagicMock(return_value=[trail("train", "evaluate"), trail("evaluate", "\ntrain")])
    for theirs in (ours, [UNKNOWN, "ab12"], ["3", UNKNOWN], 1, "", [1], {}, [[1], 2, 3]):  # no history: it is not known
        for histories in ([ours, theirs], [theirs, ours], [theirs, theirs]):
            require_same_history(histories, trails)
    batches = r"different numbers of batches .*: worker 0: 3; worker 1: 2\..* next\(iterator\)"
    with pytest.raises(ProgramMismatchError, match=batches):
        require_same_history([["3", "ab"], ["2", "cd"]], trails)
    assert trails.call_count == 0, "only who has done other things is asked for more"
    order = (
        r"in different orders.* wrong since step 1 \(worker 0: train, then evaluate; worker 1: evaluate, then \\ntrain\)\. .*: "
        r"worker 0: train, evaluate; worker 1: evaluate, \\ntrain\.\n[^$]*DEBUG=detail"
    )
    with pytest.raises(ProgramMismatchError, match=order):
        require_same_history([["3", "ab"], ["3", "cd"]], trails)


def test_a_comparison_is_told_to_workers_that_do_not_come_and_may_be_made_again() -> None:
    job = Job(1)
    [progress], before = job.progress, job.progress[0].trail.last

    def interrupted(*_: object) -> None:
        (phase,) = progress.phases
        told = (phase.text, phase.detail, phase.waits, progress.trail.last.what)
        assert told == ("the comparison of programs", "'train'", True, "train")
        raise KeyboardInterrupt

    job.workers[0].exchange = interrupted
    with pytest.raises(KeyboardInterrupt):
        check(job.agreements[0], *TRAIN)
    assert progress.trail.last == before and not progress.phases
    job.workers[0].exchange = lambda channel, own: [own, [*own[:2], "1", *own[3:]]]
    with pytest.raises(ProgramMismatchError, match="worker 0: 0; worker 1: 1"):
        check(job.agreements[0], *TRAIN)
    assert progress.trail.last == before._replace(number=1), "no other entry has this number"


def test_batches_that_differ_are_told_with_what_helps() -> None:
    def trail_of(checksum: int) -> str:
        progress = Progress()
        progress.took_batch(BatchPlace(0, 0, 1, 5), [4, 4])
        progress.enter("train", b"train")
        progress.took_batch(BatchPlace(0, 0, 2, checksum), [4, 4])
        return progress.tell()

    assert other_order([trail_of(6), trail_of(7)]).startswith(
        "the workers have read different batches, so that results are wrong since step 2 (worker 0: a batch; worker 1: a batch, "
        "another of this name). Under AutoShardPolicy.DATA every worker reads the same batches"
    )
    number = (
        "taken different numbers of batches of their distributed datasets: since step 1 (worker 0: a batch, then train; worker"
    )
    assert number in other_order([trail_of(6), trail("train")])
    assert "in different orders" in other_order([trail("train", "a"), trail("train", "b")])


def test_each_kind_of_difference_is_shown_on_every_worker() -> None:
    for odd, *shown in [
        ([EVALUATE, TRAIN], "evaluate", "train"),  # another order
        ([("train", lowered(jnp.sum, (5,)))], "tensor<4xf32>", "tensor<5xf32>"),
        ([("train", lowered(jnp.sum, dtype="int32"))], "tensor<4xf32>", "tensor<4xi32>"),
        ([("train", lowered(jnp.max))], "stablehlo.add", "stablehlo.maximum"),
        ([("extra", lowered(lambda x: x + 1)), TRAIN], "extra", "train"),
        ([("train", f"{TRAIN[1]}and more")], "it has ended before the others", "and more"),
    ]:
        job = Job(4)

        def work(worker: int, agreement: Agreement, odd: list[tuple[str, str]] = odd) -> str:
            with pytest.raises(ProgramMismatchError) as caught:
                for name, text in odd if worker == 1 else [TRAIN, EVALUATE]:
                    check(agreement, name, text)
            check(agreement, *TRAIN)  # after an error, the workers are still in step
            return str(caught.value)

        message, *others = job.run(work)
        assert others == [message] * 3
        assert message.startswith("the workers have come to different programs:\n")
        sides = re.findall(r"(?ms)^(workers? [\d, ]+: .*?)(?=^worker|^Every)", message)
        assert [side.partition(":")[0] for side in sides] == ["workers 0, 2, 3", "worker 1"]
        assert all(part in message for part in shown) and len(message) < 6000, message
        assert "Every worker must run the same programs in the same order" in message
        assert re.search(r"(?m)^Look for what differs by worker: a Python number that the step uses, such as a rank", message)
        assert all(progress.phases == () for progress in job.progress)


def test_only_what_differs_is_shown_of_long_programs_and_long_lines() -> None:
    job = Job(2)
    lines = [f"%{i} = add %{i - 1}, %1 : tensor<4xf32>" for i in range(3000)]
    lines[1500] = "a" * 5000

    def work(worker: int, agreement: Agreement) -> None:
        mine = lines.copy()
        mine[1500] = "a" * 2500 + f"<{worker}>" + "a" * 2500
        check(agreement, "train", "\n".join(mine))

    message = str(job.run(work)[0])
    assert "line 1501 of 3000:" in message and "aaa<0>aaa" in message and "aaa<1>aaa" in message
    assert "%1499 = add" in message and "%1505 = add" in message and "%1507 = add" not in message and "%1490 = add" not in message
    assert len(message) < 4000
    assert sum(map(len, job.client.values.values())) < 4000, "little is sent"


def test_the_debug_mode_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("", False), ("detail", True), ("Detail", False)):
        monkeypatch.setenv("MIRRORED_DEBUG", value)
        assert Agreement(Coordination()).checks_order is wanted
    monkeypatch.delenv("MIRRORED_DEBUG")
    assert Agreement(Coordination()).checks_order is False


def test_what_another_process_writes_is_shown_escaped() -> None:
    for garbage in ("null", "[]", '["only one"]', '[1, {"a": 2}]', '"text"', "[" * 50 + "]" * 50):
        client = FakeClient()
        agreement = Agreement(Coordination(client, 0, 2), Progress())
        values = [garbage, json.dumps("no count"), *[json.dumps("evil\x1b[2J\nCRITICAL")] * 15]
        for number, value in enumerate(values):
            here = f"mirrored/exchange/agreement/{number}"
            client.key_value_set(f"{here}/same-are", "different")
            client.key_value_set(f"{here}/given/1", value)
            client.key_value_increment(f"{here}/givers/all", 1)
        with pytest.raises(ProgramMismatchError) as caught:
            check(agreement, "tr\x1bain", "0123456789" * 100)
        message = str(caught.value)
        assert "  | evil\\x1b[2J\n  | CRITICAL" in message and all(line.isprintable() for line in message.split("\n"))
