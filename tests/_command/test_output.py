"""Output is cut into lines without loss, and what a summary shows is escaped and short."""

import os
import termios
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrored._command import output
from mirrored._command.output import LineCutter, LogFile, Outlet, Tail, make_log_folder, prefix


def cut(*pieces: bytes) -> list[bytes]:
    cutter = LineCutter()
    return [line for piece in pieces for line in cutter.feed(piece)] + cutter.finish()


def test_output_is_cut_into_lines() -> None:
    cases = [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a\r\nb"], [b"a", b"b"]),
        ([b"a\r", b"\nb\r"], [b"a", b"b"]),
        ([b"\n\n"], [b"", b""]),
        ([b"\r 10%", b"\r 20%\r", b" 30%\n"], [b" 10%", b" 20%", b" 30%"]),
        ([b"\x00\xff\x1b[0m\n"], [b"\x00\xff\x1b[0m"]),
        ([b""], []),
    ]
    assert [case for case in cases if cut(*case[0]) != case[1]] == []


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.text("ab\r\n", max_size=40), max_size=8), st.integers(1, 5))
def test_nothing_is_lost_however_the_output_is_cut(texts: list[str], limit: int) -> None:
    pieces = [text.encode() for text in texts]
    whole = b"".join(pieces)
    assert cut(*pieces) == cut(whole)
    assert b"".join(cut(whole)) == whole.replace(b"\r", b"").replace(b"\n", b"")
    before = output.LINE_BYTES
    output.LINE_BYTES = limit
    try:
        cutter = LineCutter()
        got = [line for piece in pieces for line in cutter.feed(piece)]
        assert len(cutter._rest) <= limit
        assert b"".join(got + cutter.finish()).replace(b"\r", b"") == whole.replace(b"\r", b"").replace(b"\n", b"")
    finally:
        output.LINE_BYTES = before


def test_prefixes_are_equally_wide() -> None:
    for place, shown in {(0, 11): b"[0]  ", (10, 11): b"[10] ", (0, 10): b"[0] ", (0, 1): b"[0] "}.items():
        assert prefix(*place, False) == shown
    assert prefix(3, 11, True) == b"\x1b[35m[3]\x1b[0m  "


def test_what_a_carriage_return_ends_is_a_state_that_is_as_wide_as_the_terminal_and_gives_way_to_a_line(monkeypatch) -> None:
    assert [type(line) is output.BarState for line in cut(b"\r1%\r2%\rline\n3%")] == [True, True, False, False]
    own, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (5, 12))
    outlet = Outlet(terminal)
    outlet.show(b"[0] ", b"0123456789")
    outlet.show(b"[0] ", "é%".encode())
    outlet.write(b"line")
    outlet.show(b"", b"last")
    outlet.end()
    outlet.end()
    outlet.flush()
    erase = b"\r\x1b[K"
    for no_color, has_colour in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert Outlet(terminal).has_colour is has_colour
    assert os.read(own, 4096) == erase + b"[0] 0123456" + erase + "[0] é%".encode() + erase + b"line" + erase + b"last\r\n"
    os.close(own)
    os.close(terminal)


def test_the_tail_is_the_end_escaped_and_short() -> None:
    tail = Tail()
    for i in range(30):
        tail.add(b"line %d" % i)
    tail.add(b"")
    tail.add("\x1b[2J\té\xff".encode("latin-1"))
    assert tail.lines() == [*(f"line {i}" for i in range(11, 30)), "\\x1b[2J\\t\\xe9\\xff"]
    for _ in range(30):
        tail.add(b"\x00" * 100_000)
    assert 0 < sum(map(len, tail.lines())) <= output.TAIL_CHARACTERS
    for i in range(30):
        tail.add(output.BarState(b"%d%%" % i))
    assert tail.lines()[-1] == "29%" and "28%" not in tail.lines()


def tail_of(*lines: str) -> list[str]:
    tail = Tail()
    for line in lines:
        tail.add(line.encode())
    return tail.lines()


VERDICT = "CRITICAL:mirrored:worker 1 leaves with code 75: worker 0 is late"
STACKS = [
    "worker 1 was here:",
    "MainThread:",
    *['  File "train.py", line 3, in <module>', "    step()", "    ~~~~^^"] * 9,
    "mirrored input:",
    '  File "threading.py", line 1002, in _bootstrap',
]


def test_a_verdict_is_shown_whole_and_without_stacks() -> None:
    before, detail = [f"step {i}" for i in range(30)], ["  |   worker 0: in its own code", "  |   worker 1: waits"]
    assert tail_of(*before, VERDICT, *detail, *STACKS) == [VERDICT, *detail]
    assert tail_of(*before, VERDICT, *detail, *STACKS, "Fatal error", "  of C") == [VERDICT, *detail, "Fatal error", "  of C"]
    assert tail_of(*before, VERDICT, *detail, *STACKS * 9) == [VERDICT, *detail], "also below stacks of many threads"
    assert tail_of("old", "worker 1 leaves with code 75: old", VERDICT) == [VERDICT]
    assert tail_of(VERDICT + "x" * 1000)[0] == VERDICT + "x" * 1000
    many = tail_of(VERDICT, *before)
    assert many == [VERDICT, *before[-19:]]


def test_what_is_no_verdict_of_the_library_hides_nothing() -> None:
    error = ["Traceback (most recent call last):", "ValueError: the reason"]
    own = "worker 1 leaves with code 1: worker 1 failed at step 3 with ValueError: the reason"
    assert tail_of(*error, own) == [*error, own]
    assert tail_of(*error, *STACKS) == error
    lines = [f"step {i}" for i in range(300)]
    assert tail_of(VERDICT, *lines) == lines[-20:]
    assert tail_of("I was here:", "  indented") == ["I was here:", "  indented"]


def test_an_outlet_takes_what_fits_and_forgets_what_nobody_reads() -> None:
    read, write = os.pipe()
    outlet = Outlet(write)
    outlet.write(b"x" * 10_000)
    outlet.flush()
    assert os.read(read, 100_000) == b"x" * 4096
    assert outlet.is_waiting and not outlet.is_full
    outlet.write(b"x" * output.PENDING_BYTES)
    assert outlet.is_full
    os.close(read)
    outlet.flush()
    outlet.write(b"more")
    assert not outlet.is_waiting and not outlet.is_full
    os.close(write)


def test_an_outlet_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    outlet = Outlet(full)
    for _ in range(2):
        outlet.write(b"lost")
        outlet.flush()
    assert capfd.readouterr().err == "mirrored launch: output is lost: No space left on device\n"
    with (tmp_path / "log").open("wb") as log:
        os.dup2(log.fileno(), full)
    outlet.write(b"kept")
    outlet.flush()
    os.close(full)
    assert (tmp_path / "log").read_bytes() == b"kept"


def test_an_outlet_that_cannot_take_anything_now_keeps_it() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    outlet = Outlet(write)
    outlet.write(b"x" * 1_000_000)
    for _ in range(1000):
        outlet.flush()
    got = b""
    while outlet.is_waiting:
        got += os.read(read, 1_000_000)
        outlet.flush()
    assert got + os.read(read, 1_000_000) == b"x" * 1_000_000
    os.close(read)
    os.close(write)


def test_log_files_are_new_and_private_and_their_folders_count_on_and_follow_no_links(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    assert log.append(b"\x1b\xff\r\n") is None
    log.close()
    log.close()
    assert log.append(b"late") is None
    assert (tmp_path / "log").read_bytes() == b"\x1b\xff\r\n" and (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("log", "link"):
        with pytest.raises(FileExistsError):
            LogFile(tmp_path / name)
    (tmp_path / "attempt-1").symlink_to(tmp_path)
    made = [make_log_folder(tmp_path, number, "").name for number in (0, 1, 2, 0)]
    assert made == ["attempt-0", "attempt-2", "attempt-3", "attempt-4"]
