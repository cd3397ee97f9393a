"""Where the workers are, and who waits in vain: told from what they say, and never of one that may only be slow."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from mirrored._workers.progress import NEXT_BATCH, OTHERS_INPUT, BatchPlace, Progress
from mirrored._workers.stall import MIN_STALL_SECONDS, JobView, Others, Own, Position, decode, judge, judge_all, shorter_data
from mirrored._workers.verdict import Verdict

change = Position._replace
OWN_CODE = Position(1, 12, "train", "", "", False, False, False, 400.0, -1, 0, [], [])
IN_STEP = change(OWN_CODE, started=13, waits=True)
AT_BARRIER = change(OWN_CODE, phase="the barrier 'epoch'", waits=True)
ENDED = change(OWN_CODE, has_ended=True)
INPUT = change(OWN_CODE, phase=NEXT_BATCH, detail="its own pipeline works on it")
OTHERS = change(INPUT, detail=OTHERS_INPUT)
SAVING = change(OWN_CODE, phase="saving step 12", is_patient=True)


def judged(here: Position, there: Position, limit: float = 300.0, silent: float = 0.0) -> str:
    return judge(0, JobView({0: here, 1: there}, {1: silent}), limit) or ""


def test_who_waits_in_vain_is_told_for_whom() -> None:
    for here, there, *parts in [
        (IN_STEP, ENDED, "worker 1 has ended its program after step 12 (program 'train')", "worker 0 waits in step 13", "number"),
        (AT_BARRIER, ENDED, "worker 1 has ended its program", "worker 0 waits at the barrier 'epoch'"),
        (change(AT_BARRIER, still=0.5), ENDED, "worker 1 has ended its program", "worker 0 waits at the barrier 'epoch'"),
        (IN_STEP, AT_BARRIER, "worker 1 waits at the barrier 'epoch', after step 12", "worker 0 waits in step 13", "each other"),
        (AT_BARRIER, IN_STEP, "worker 1 waits in step 13", "They wait for each other"),
        (AT_BARRIER, change(AT_BARRIER, phase="the end"), "worker 1 waits at the end", "They wait for each other"),
        (AT_BARRIER, OTHERS, "worker 0 waits at the barrier 'epoch'", "worker 1 waits for the next batch (its own is", "other"),
        (OTHERS, IN_STEP, "worker 0 waits for the next batch", "worker 1 waits in step 13"),
        (OTHERS, ENDED, "worker 1 has ended its program", "worker 0 waits for the next batch", "steps and batches"),
        (IN_STEP, OWN_CODE, "worker 1 has not entered step 13 (program 'train') for 400 s, which is the limit"),
        (AT_BARRIER, OWN_CODE, "worker 1 has not entered the barrier 'epoch' for 400 s"),
        (IN_STEP, change(IN_STEP, started=12), "worker 1 has not entered step 13"),
        (IN_STEP, IN_STEP, "no worker has finished step 13"),
    ]:
        title, *lines = judged(here, there).split("\n")
        assert all(part in title for part in parts), (title, parts)
        assert [line.partition(":")[0] for line in lines] == ["  worker 0", "  worker 1"]
        if "limit" not in title:  # what is certain is said alike by both sides, the worker that has ended first
            assert title.startswith("worker 1 has ended" if there.has_ended else "worker 0 waits")
            assert there.has_ended or title == (judge(1, JobView({0: here, 1: there}, {}), 300.0) or "").partition("\n")[0]


def test_who_may_only_be_slow_is_waited_for() -> None:
    assert not judged(IN_STEP, SAVING), "saving may take its time, also after the limit"
    for why, here, there in [
        ("the limit has not come", IN_STEP, OWN_CODE),
        ("it has started all that this one waits for", IN_STEP, change(ENDED, started=13)),
        ("a step that this one has started too", OTHERS, change(IN_STEP, started=12)),
        ("whose pipeline works", OTHERS, INPUT),
        ("it may come to it", AT_BARRIER, INPUT),
        ("the last it gave may be on its way", OTHERS, change(ENDED, still=1.0)),
        ("its own error may come first", change(OTHERS, started=13, still=1.0), ENDED),
        ("the last it gave may be on its way", AT_BARRIER, change(ENDED, still=0.1)),
        ("the last it gave may be on its way", change(AT_BARRIER, still=0.1), ENDED),
        ("a step that this one has started too", AT_BARRIER, change(IN_STEP, started=12)),
        ("it only runs ahead", IN_STEP, change(IN_STEP, started=15)),
        ("it may have come this moment", IN_STEP, change(AT_BARRIER, still=0.2)),
        ("it may have come this moment", change(IN_STEP, still=0.2), AT_BARRIER),
        ("all are there", AT_BARRIER, AT_BARRIER),
    ]:
        assert not judged(here, there, limit=500.0), why


def test_data_that_has_ended_while_another_worker_has_taken_more_is_certain() -> None:
    ended = change(OTHERS, ends=[[7, 0, 3], [8, 1, 5]])
    for batch, found in (([8, 1, 6], (1, 0)), ([8, 1, 5], None), ([8, 2, 6], None), ([9, 1, 6], None), ([], None)):
        assert shorter_data({0: change(IN_STEP, batch=batch), 1: ended}) == found, batch
    progress = Progress()
    progress.took_batch(BatchPlace(8, 1, 6, 55), [2, 2])
    progress.data_ends[8] = BatchPlace(8, 1, 9, 66)
    own = Own(progress, None).measure(0.0, False)
    assert (own.batch, own.ends) == ([8, 1, 6], [[8, 1, 9]]) and decode(own.encode()) == own
    for foul in ({"batch": [1, 2]}, {"batch": ["1", 2, 3]}, {"ends": [1]}, {"ends": [[1, 2]]}, {"ends": [[1, 2, None]]}):
        assert decode(json.dumps(own._replace(**foul))) is None


def test_of_all_that_wait_one_is_judged_for_each_place() -> None:
    positions = {worker: change(IN_STEP, still=float(worker)) for worker in range(200)} | {7: SAVING, 9: ENDED}
    ended = judge_all(JobView(positions, {}), 300.0)
    assert str(ended).startswith("worker 9 has ended its program after step 12 (program 'train'), and")
    assert judge_all(JobView(positions | {9: OWN_CODE}, {}), 300.0) is None
    assert judge_all(JobView(positions | {9: OWN_CODE}, {}), 100.0) is None, "one saves"
    late = judge_all(JobView(positions | {7: OWN_CODE, 9: OWN_CODE}, {}), 100.0)
    assert str(late).startswith("workers 7, 9 have not entered step 13 (program 'train') for 199 s")
    assert judge_all(JobView({0: change(IN_STEP, has_ended=True), 1: OWN_CODE}, {}), 300.0) is None, "an end has no limit"
    alone = {0: SAVING, 1: IN_STEP, 2: ENDED}
    assert judge_all(JobView(alone, {}), 300.0)
    assert judge_all(JobView(alone, {1: 2.0}), 300.0) is None, "one that is not heard may be elsewhere"


def test_who_does_not_see_all_says_nothing_of_nobody() -> None:
    all_there = JobView({0: IN_STEP, 1: IN_STEP}, {})
    assert judge(1, all_there, 300.0) and judge(1, all_there, 300.0, sees_all=False) is None
    assert judge(1, JobView({0: OWN_CODE, 1: IN_STEP}, {}), 300.0, sees_all=False)


def test_a_stopped_worker_is_late_wherever_it_was() -> None:
    for there in (SAVING, IN_STEP):
        text = judged(IN_STEP, there, silent=20.0)
        assert "worker 1 has not entered step 13" in text and "silent for 20 s" in text
    text = judged(OTHERS, OTHERS, silent=20.0)
    assert text.startswith("the input of worker 1 has given no batch") and "silent for 20 s" in text


def test_whose_input_is_stuck_is_named() -> None:
    for own, positions, title in [
        (0, [OTHERS, INPUT], "the input of worker 1 has given no batch for 400 s, which is the limit"),
        (0, [INPUT, OTHERS], "the input of worker 0 has given no batch"),  # seen by the culprit's own guard
        (1, [OTHERS, OTHERS, INPUT, OTHERS], "the input of worker 2 has given no batch"),
        (1, [INPUT, OTHERS, INPUT, OTHERS], "the input of workers 0, 2 has given no batch"),
        (0, [INPUT, INPUT], "the input of workers 0, 1 has given no batch"),
        (0, [OTHERS, OWN_CODE], "worker 1 has not entered the next batch for 400 s"),  # its thread may not read further ahead
        (0, [IN_STEP, INPUT], "the input of worker 1 has given no batch for 400 s"),  # worker 0 has a batch of its own
        (0, [INPUT, IN_STEP], "the input of worker 0 has given no batch for 400 s"),
        (0, [INPUT, change(IN_STEP, started=12)], "workers 0, 1 have not entered the next batch"),
        (0, [OTHERS, OTHERS], "no worker has finished the next batch"),
    ]:
        view = JobView(dict(enumerate(positions)), {})
        text = judge(own, view, 300.0) or ""
        assert text.startswith(title) and "If it only needs longer: mr.CommunicationOptions(timeout_seconds=...)" in text, title
        assert judge(own, view, 500.0) is None, "before the limit, nothing"
    assert not judged(OTHERS, SAVING)


def test_what_was_said_long_ago_may_be_over() -> None:
    """A call that holds Python's lock for long keeps a worker from saying that it goes on."""
    assert not judged(AT_BARRIER, OTHERS, limit=500.0, silent=1.5)
    assert judged(AT_BARRIER, OTHERS, limit=500.0, silent=0.5)
    assert judged(IN_STEP, ENDED, limit=500.0, silent=1.5), "but an end is for ever"
    assert judged(change(IN_STEP, still=0.0), change(ENDED, still=0.0)).startswith("worker 1 has ended its program")


def test_the_limit_is_twenty_steps_when_those_are_long() -> None:
    progress = Progress()
    own = Own(progress, None)
    for _ in range(9):
        progress.started += 4
        own.measure(0.5, False)
    assert own.limit == MIN_STALL_SECONDS
    for _ in range(40):
        progress.started += 1
        own.measure(20.0, False)
        own.measure(20.0, False)
    assert own.limit == pytest.approx(20 * 40.0)
    assert Own(progress, 5.0).limit == 5.0


def test_time_counts_while_nothing_changes() -> None:
    progress = Progress()
    own = Own(progress, None)
    assert [own.measure(0.5, False).still for _ in range(3)] == [0.0, 0.5, 1.0]
    progress.enter("train", b"train")
    position = own.measure(0.5, False)
    assert (position.still, position.started, position.waits, position.beat) == (0.0, 1, True, 4)
    with progress.phase("the barrier 'b'", "of the data", waits=True):
        assert str(own.measure(0.5, False)) == "waits at the barrier 'b' (of the data), after step 1 (program 'train'), for 0 s"
    assert own.measure(0.5, True).has_ended


def test_a_worker_that_does_not_speak_is_silent() -> None:
    others = Others()
    for beat, silent in ((1, 0.0), (1, 0.5), (1, 1.0), (2, 0.0)):
        assert others.hear({1: change(OWN_CODE, beat=beat).encode()}, 0.5).silent == {1: silent}
    assert others.hear({1: "garbage"}, 0.5).silent == {1: 0.0}
    assert others.hear({1: change(OWN_CODE, beat=2).encode()}, 0.5).silent == {1: 0.5}
    others = Others(pause=3.0)  # where a round is long, nobody is silent within one
    assert [others.hear({1: OWN_CODE.encode()}, 2.0).silence(1) for _ in range(4)] == [0.0, 0.0, 1.0, 3.0]


@hypothesis.settings(derandomize=True, deadline=None, max_examples=20)
@hypothesis.given(st.one_of(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)))
@hypothesis.example("[" * 100_000)
def test_what_is_no_position_and_no_verdict_does_no_harm(text: str) -> None:
    assert decode(text) is None
    assert "another process has written" in str(Verdict.decode(text))


def test_a_position_survives_the_way_and_nothing_else_is_one() -> None:
    for position in (OWN_CODE, IN_STEP, AT_BARRIER, ENDED, SAVING, change(OWN_CODE, program="x" * 100_000)):
        assert decode(position.encode()) == position
    assert decode(OWN_CODE.encode() + " " * 1_000_000) is None, "no place is so long"
    for name, value in {"beat": "1", "started": None, "program": 3, "waits": 1, "still": "long"}.items():
        assert decode(json.dumps(OWN_CODE._replace(**{name: value}))) is None
