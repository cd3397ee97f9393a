"""Workers tell each other small things: in order, by worker, and with a message when one does not come."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_service import FakeClient

import mirrored as mr
from mirrored._workers import coordination
from mirrored._workers.coordination import ChannelClosed, Coordination


def cluster(num_workers: int) -> list[Coordination]:
    client = FakeClient()
    return [Coordination(client, worker, num_workers) for worker in range(num_workers)]


def on_each(workers: list[Coordination], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(workers)) as pool:
        return [future.result() for future in [pool.submit(work, worker) for worker in workers]]


def give(this: Coordination, channel: str, text: str) -> None:
    """Come to the first exchange of a channel with any text, as what is no worker of this version would."""
    this.put(f"exchange/{channel}/0/same-are", "different")
    this.put(f"exchange/{channel}/0/given/{this.worker}", text)
    this.count(f"exchange/{channel}/0/givers/all")


def test_an_exchange_gives_the_values_of_all_in_worker_order_and_what_was_read_by_all_is_removed() -> None:
    def work(this: Coordination) -> list[Any]:
        return [this.exchange("a", {"worker": this.worker, "round": i}) for i in range(5)]

    workers = cluster(3)
    for every in (on_each(workers, work), on_each([Coordination()], work)):
        assert every == [[[{"worker": w, "round": i} for w in range(len(every))] for i in range(5)]] * len(every)
    assert len([key for key in workers[0]._client.values if "/given/" in key]) == 3, "only the last round is kept"


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_to_find_all_equal_takes_two_messages_a_worker_whatever_their_number(num_workers: int) -> None:
    """Beside one that looks who else is there, one that tells all, and one that removes the round before."""
    workers = cluster(num_workers)
    on_each(workers, lambda this: this.exchange("a", 0))
    client = workers[0]._client
    client.counted.clear()
    assert on_each(workers, lambda this: this.exchange("a", [1, "x"])) == [[[1, "x"]] * num_workers] * num_workers
    assert client.counted["key_value_increment"] == num_workers
    assert client.counted.total() <= 2 * num_workers + 2  # more only where one waits for longer than a slice
    assert len([key for key in client.values if key.startswith("mirrored/exchange/a/")]) == 2, "and none of the round before"


def test_who_differs_is_told_without_waiting_for_all() -> None:
    """The third comes when the two others know already that they differ."""
    workers = cluster(3)

    def work(this: Coordination) -> Any:
        if this.worker == 2:
            assert this.get("exchange/a/0/same-are", 10) == "different"
        return this.exchange("a", min(this.worker, 1)), this.exchange("a", 5), this.exchange("a", 6)

    assert on_each(workers, work) == [([0, 1, 1], [5] * 3, [6] * 3)] * 3


def test_an_exchange_that_was_interrupted_may_be_made_again() -> None:
    here, there = cluster(2)
    for values in ((1, 1), (2, 3), (4, 4), (5, 5)):
        with pytest.raises(mr.WorkerLostError, match="not all workers have come to 'a', where worker 0 waits for them"):
            here.exchange("a", 7 if values[0] == 5 else values[0], timeout_seconds=0.02)
        told = on_each([here, there], lambda this, values=values: this.exchange("a", values[this.worker]))
        assert told == [list(values)] * 2


def test_the_chief_tells_the_others_by_one_message_each() -> None:
    def work(this: Coordination) -> list[Any]:
        told = []
        for number in range(3):
            this.exchange("between", number)
            told.append(this.of_chief("a", [this.worker, number]))
        return told

    workers = cluster(3)
    for every in (on_each(workers, work), on_each([Coordination()], work)):
        assert every == [[[0, 0], [0, 1], [0, 2]]] * len(every)
    assert [key for key in workers[0]._client.values if "chief" in key] == ["mirrored/chief/a/2"]


def test_closed_channels_leave_nothing_behind() -> None:
    """An iterator over the data of each epoch has one; what the last one leaves goes with the next."""

    def work(this: Coordination) -> None:
        for epoch in range(5):
            channel = this.channel("input")
            assert [channel.exchange([epoch, i]) for i in range(4)][-1] == [[epoch, 3]] * 3
            channel.close()
            channel.close()
            this.channel("input").close()  # of an iterator that nobody has asked

    workers = cluster(3)
    on_each(workers, work)
    assert {key.rpartition("3/")[0] for key in workers[0]._client.values} == {"mirrored/exchange/input:8/"}


def test_what_others_may_still_read_of_a_closed_channel_stays() -> None:
    """One that was opened before the close says nothing of whether the others have closed it too."""
    here, there = cluster(2)
    key = "exchange/input:0/0/same-are"

    def work(this: Coordination) -> list[bool]:
        first, second = this.channel("input"), this.channel("input")
        if this is here:
            this.put(key, "same")  # the other has not read it
            first.close()
        assert second.exchange("s") == ["s"] * 2
        is_there = [this.peek(key) is not None]
        assert this.channel("input").exchange("t") == ["t"] * 2
        return [*is_there, this.peek(key) is not None]

    assert on_each([here, there], work)[0] == [True, False]


def test_the_last_keys_of_another_threads_channel_stay() -> None:
    """A thread of the program's own may read one dataset while the main thread goes from one to the next."""
    here, there = cluster(2)
    first = here.channel("input")
    here.put("exchange/input:0/0/same-are", "same")
    first.close()
    there.channel("input").close()
    on_each([here, there], lambda this: this.channel("input").exchange("t"))  # in threads of a pool
    assert here.peek("exchange/input:0/0/same-are")


def test_a_barrier_of_another_name_is_shown_escaped_and_cut() -> None:
    here, there = cluster(2)
    give(there, "barrier", json.dumps({"a": "\x1b" * 1000}))
    with pytest.raises(mr.WorkerLostError, match=r"different barriers: worker 0 'x', worker 1 .*\\x1b") as caught:
        here.barrier("x")
    assert len(str(caught.value)) < 1000


def test_an_exchange_can_be_ended_from_another_thread() -> None:
    channel = Coordination(FakeClient(), 0, 2).channel("input")
    threading.Timer(0.05, channel.close).start()
    with pytest.raises(ChannelClosed):
        channel.exchange(1)


def test_what_is_no_value_of_another_worker_is_an_error_that_names_it(monkeypatch) -> None:
    for text, limit in (("[" * 200_000, 10**6), ("no JSON\x1b[2J", 10**6), ("", 10**6), ('"' + "A" * 1000 + '"', 1001)):
        monkeypatch.setattr(coordination, "MAX_TEXT", limit)
        here, there = cluster(2)
        give(there, "a", text)
        with pytest.raises(mr.ProgramMismatchError, match=r"worker 1 has given .* at 'a'; expected JSON of at most") as caught:
            here.exchange("a", 1)
        assert len(str(caught.value)) < 1000 and "\x1b" not in str(caught.value)


def test_too_much_is_refused_on_all_workers_alike_and_not_sent(monkeypatch) -> None:
    monkeypatch.setattr(coordination, "MAX_TEXT", 1000)

    def work(this: Coordination) -> tuple[str, Any]:
        with pytest.raises(mr.ProgramMismatchError) as caught:
            this.exchange("a", "A" * (5000 if this.worker else 998))
        assert len(this.peek(f"exchange/a/0/given/{this.worker}") or "") <= 1001
        return str(caught.value), this.exchange("a", "A" * 998)

    (said, following), other = on_each(cluster(2), work)
    assert (said, following) == other and "worker 1 has given more than 1000 characters" in said
    assert following == ["A" * 998] * 2


def test_an_error_of_the_service_is_not_taken_for_a_timeout() -> None:
    this, _ = cluster(2)
    this._client.reason = "UNAVAILABLE: Socket closed"
    for ask in (lambda: this.get("a", 1), lambda: this.peek("a")):
        with pytest.raises(RuntimeError, match="UNAVAILABLE"):
            ask()
