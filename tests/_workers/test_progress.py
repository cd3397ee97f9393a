"""What the process says that it is doing: true at every moment, and almost free."""

import threading
from collections.abc import Callable

import pytest

from mirrored._errors import ContextError
from mirrored._workers.progress import UNKNOWN, Progress


class Witness:
    def __init__(self, ready: bool = False, deleted: bool = False) -> None:
        self.ready, self.deleted = ready, deleted

    def is_ready(self) -> bool:
        assert not self.deleted, "JAX raises when a deleted array is asked"
        return self.ready

    def is_deleted(self) -> bool:
        return self.deleted


def test_it_waits_from_before_a_program_starts_until_its_result_is_there_was_donated_or_is_known_to_have_finished() -> None:
    class DeletedMeanwhile(Witness):
        def is_ready(self) -> bool:
            raise RuntimeError("Array has been deleted.")

    progress = Progress()
    assert not progress.is_waiting()
    for witness in (Witness(ready=True), Witness(deleted=True), DeletedMeanwhile()):
        progress.enter("train", b"train")
        assert progress.is_waiting(), "the result of the program before says nothing of this one"
        progress.witness = witness
        assert not progress.is_waiting()
    progress.enter("train", b"train")
    progress.witness = Witness()
    assert progress.is_waiting()
    with progress.phase("saving step 1", is_patient=True):
        assert not progress.is_waiting(), "it saves while a program runs"
        with pytest.raises(KeyError), progress.phase("the barrier 'saved'", waits=True):
            assert progress.is_waiting()
            raise KeyError
        assert not progress.is_waiting()
    progress.finished = 4
    assert not progress.is_waiting()


def test_phases_of_two_threads_do_not_end_each_other() -> None:
    progress = Progress()
    one, two = progress.phase("one"), progress.phase("two")
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert progress.phases == (two,)
    two.__exit__(None, None, None)

    def work() -> None:
        for _ in range(5_000):
            with progress.phase("the next batch"):
                pass

    on_threads(work, work)
    assert progress.phases == ()


def on_threads(*work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=one, name="evaluation") for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_batches_that_another_thread_takes_are_not_counted() -> None:
    progress = Progress()
    progress.took_batch(None, [4])
    seen: list[list[str]] = []
    on_threads(lambda: [progress.took_batch(None, [4]), seen.append(progress.history())])
    assert progress.history()[0] == "1" and seen[0][0] == UNKNOWN


def test_one_thread_does_what_workers_do_together_until_it_ends_or_hands_over() -> None:
    progress, refused = Progress(), []

    def refuse(act: Callable[[], object]) -> None:
        with pytest.raises(ContextError, match=r"in the thread .*; expected .*strategy\.barrier") as raised:
            act()
        refused.append(str(raised.value))

    def run() -> None:
        progress.enter("train", b"0", is_run=True)

    wait = progress.phase("saving", waits=True)
    on_threads(lambda: progress.enter("initial values", b"0"), wait.__enter__, lambda: wait.__exit__(None, None, None))
    progress.enter("initial values", b"0")  # no run yet, so a thread may begin that trains
    for _ in range(3):  # each with the number of the one before, maybe, which has ended
        on_threads(run)
        assert not progress.trail.is_elsewhere()
    run()
    on_threads(lambda: refuse(run), lambda: refuse(lambda: progress.did("assign", b"0")), lambda: refuse(wait.__enter__))
    on_threads(lambda: progress.took_batch(None, [1]))
    assert progress.trail.last.number == progress.started == 6 and progress.phases == ()
    assert refused[0].startswith("'train' was called in the thread 'evaluation'") and "'MainThread'" in refused[0]

    def go_on() -> None:
        progress.trail.take_over()
        run()
        on_threads(lambda: refuse(run))

    on_threads(go_on)
    assert progress.trail.last.number == 7 and len(refused) == 4
