"""What is wrong between hosts is found: versions, connections, clocks, the folder of checkpoints."""

import itertools
import re
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from together import run_together

from mirrored._command import check_cluster, check_folder
from mirrored._command.check_lines import Finding, Lines


def test_workers_that_are_not_reached_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is behind a firewall; of many, three are tried."""
    connect, tried = socket.create_connection, itertools.count()

    def guarded(address: tuple[str, int], timeout: float) -> Any:
        if address[0] == "127.0.0.2":
            next(tried)
            raise TimeoutError("timed out")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", guarded)
    monkeypatch.setattr(check_cluster, "_ports", lambda: "1-2")
    found = run_together(3, lambda lines: check_cluster.connections(lines, f"127.0.0.{1 + (lines.worker == 1)}"))
    assert [bool(finding.problem) for finding in found] == [True, False, True]
    expected = r"cannot reach worker 1 on host-1 at 127.0.0.2:\d+ \(timed out\); open the TCP ports 1-2 between the hosts: .*"
    assert re.fullmatch(expected, found[0].problem)
    before = next(tried)
    found = run_together(6, lambda lines: check_cluster.connections(lines, "127.0.0.2"))
    assert all(finding.problem.count("cannot reach") == 3 for finding in found) and next(tried) == before + 1 + 6 * 3
    assert next(tried) > 0


@pytest.mark.parametrize(("skew", "expected"), [(0.4, ""), (90, "90.0 s ahead of"), (-2.5, "2.5 s behind")])
def test_clocks(skew: float, expected: str) -> None:
    """Each worker reads its clock twice; a slow reading is no wrong clock."""
    times = iter([[1000.0, 1000.1], [1000.0 + skew, 1000.1 + skew], [996.0, 1000.1]])
    own = [iter(pair) for pair in times]
    found = run_together(3, lambda lines: check_cluster.clocks(lines, lambda: next(own[lines.worker])))
    wrong = f"its clock is {expected} worker 0's: start NTP (`timedatectl set-ntp true`, or chronyd)" if expected else ""
    assert [finding.problem for finding in found] == ["", wrong, ""]
    assert found[0].fact == f"differ by at most {abs(skew):.3f} s"


def folders_of(*folders: Path, seconds: float = 0.05) -> list[Finding]:
    """Return what each worker adds for its own folder."""
    added: list[Any] = [None] * len(folders)

    def check(lines: Lines) -> None:
        lines.add = lambda name, finding: added.__setitem__(lines.worker, finding) or lines.exchange(name, None)
        check_folder.check_folder(lines, folders[lines.worker])

    run_together(len(folders), check)
    return added


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_folder, "_UNSEEN_SECONDS", 0.05)


@pytest.mark.usefixtures("_soon")
def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    chief, other = folders_of(tmp_path / "file", tmp_path)
    assert chief.problem == f"[Errno 17] File exists: '{tmp_path}/file'" and other.problem == ""


@pytest.mark.usefixtures("_soon")
def test_a_full_disk_and_a_file_that_is_read_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
        chief, other = folders_of(tmp_path, tmp_path)
    assert chief.problem == f"{tmp_path} has only 1.0 MiB free" and other.problem == ""
    write = check_folder._write

    def damaged(path: Path) -> Finding:
        finding = write(path)
        path.write_bytes(b"?" + path.read_bytes()[1:])
        return finding

    monkeypatch.setattr(check_folder, "_write", damaged)
    chief, other = folders_of(tmp_path, tmp_path)
    assert re.fullmatch(r"reads \.mirrored-check-\w+ otherwise than worker 0 on host-0 has written it", other.problem)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_is_interrupted_leaves_no_file(tmp_path: Path) -> None:
    def interrupted(name: str, value: object) -> list[Any]:
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_folder.check_folder(SimpleNamespace(worker=0, exchange=interrupted), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_answer_is_not_waited_for() -> None:
    gone = threading.Event()
    finding = check_folder.within(0.01, lambda: Finding(str(gone.wait())))
    gone.set()
    assert finding.problem == "the folder has not answered for 0 s: is the server of this file system there?"
