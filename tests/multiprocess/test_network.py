"""Two hosts with a cable between them, which is cut: each is a network namespace of this machine."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Worker, wait_for_line, workers
from test_faults import ABORTED, KILLED, SOON, listeners, moment_of_fault

SCRIPT = Path(__file__).with_name("on_host.py")
#: The heartbeat, by which JAX finds a host that does not answer.
HEARTBEAT = 11.0
NAMES = tuple(f"mirrored{os.getpid() % 10_000}{side}" for side in "ab")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_hosts() -> bool:
    if not shutil.which("ip") or os.geteuid() != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", NAMES[0]], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", NAMES[0]], capture_output=True, check=False)
    return made


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, str]]:
    """Make two hosts whose names mean the loopback address, as on many clusters; return what on_host.py wants to know."""
    if not can_make_hosts():
        pytest.skip("needs root, the program ip, and a kernel that has network namespaces")
    folders = [Path("/etc/netns") / name for name in NAMES]
    try:
        for name, folder in zip(NAMES, folders, strict=True):
            ip("netns", "add", name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
        ip("link", "add", NAMES[0], "netns", NAMES[0], "type", "veth", "peer", "name", NAMES[1], "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
        yield {"TEST_HOSTS": ",".join(f"{name}={address}" for name, address in zip(NAMES, ADDRESSES, strict=True))}
    finally:
        for name, folder in zip(NAMES, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another's hosts are in it
            folders[0].parent.rmdir()


def set_cable(state: str) -> None:
    ip("-n", NAMES[1], "link", "set", NAMES[1], state)


@pytest.fixture
def triangle() -> Iterator[list[str]]:
    """Make three hosts, each pair of which has a cable of its own; return their names. Host k has the end `to{j}` to host j."""
    if not can_make_hosts():
        pytest.skip("needs root, the program ip, and a kernel that has network namespaces")
    names = [f"{NAMES[0]}{number}" for number in range(3)]
    try:
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.78.{number}.1/32", "dev", "lo")
        for here, there in ((0, 1), (0, 2), (1, 2)):
            ends = ("netns", names[here], "type", "veth", "peer", "name", f"to{here}", "netns", names[there])
            ip("link", "add", f"to{there}", *ends)
            for one, other in ((here, there), (there, here)):
                ip("-n", names[one], "link", "set", f"to{other}", "up")
                ip("-n", names[one], "route", "add", f"10.78.{other}.1/32", "dev", f"to{other}", "src", f"10.78.{one}.1")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_cut_between_two_workers_that_both_reach_the_chief_is_named(triangle: list[str]) -> None:
    hosts = ",".join(f"{name}=10.78.{number}.1" for number, name in enumerate(triangle))
    with workers(SCRIPT, 3, "steps=100000", env={"TEST_HOSTS": hosts}) as running:
        wait_until_all_train(running)
        ip("-n", triangle[2], "link", "set", "to1", "down")
        cut = time.time()
        for one in [worker.wait(60) for worker in running]:
            assert one.code == 75 and one.time - cut < HEARTBEAT + SOON, one.output
            assert "leaves with code 75: lost the connection between workers 1, 2 at step" in one.output, one.output


def wait_until_all_train(running: list[Worker]) -> None:
    for worker in running:
        wait_for_line(worker, "STEP 3 ")


def test_a_job_across_hosts_listens_on_their_addresses_only_and_survives_a_short_cut(hosts: dict[str, str]) -> None:
    with workers(SCRIPT, 2, "steps=200", devices=2, env=hosts) as running:
        wait_until_all_train(running)
        set_cable("down")
        time.sleep(5.0)  # the cut is what is tested
        set_cable("up")
        for worker, address, number in zip([worker.wait(60) for worker in running], ADDRESSES, (2, 1), strict=True):
            assert worker.code == 0 and "END 200.0 2" in worker.output, worker.output
            found = listeners(worker.output)
            assert {host for host, _ in found} == {address} and len(found) == number, found


def test_both_sides_of_a_cut_end(hosts: dict[str, str]) -> None:
    """Workers 0 and 2 are on one side."""
    with workers(SCRIPT, 4, "steps=2000", env={"TEST_HOSTS": ",".join([hosts["TEST_HOSTS"]] * 2)}) as running:
        wait_until_all_train(running)
        set_cable("down")
        cut = time.time()
        try:
            ended = [worker.wait(60) for worker in running]
        finally:
            set_cable("up")
    for one in ended:
        assert one.code in (75, ABORTED) and one.time - cut < HEARTBEAT + SOON, one.output
    for other in ended[1::2]:
        assert f"worker {other.index} has been silent for 4 s: it is stopped, cut off, dead" in ended[0].output, ended[0].output
        message = (
            f"worker 0, which hosts the coordination service, has not answered worker {other.index} for 4 s: it is stopped, cut"
        )
        assert message in other.output, other.output


@pytest.mark.parametrize(
    ("culprit", "devices", "codes", "within", "message"),
    [
        (1, 1, (75,), SOON, r"lost worker 1 at step \d+: a collective failed on worker 0, and worker 1 has not answered"),
        # XLA often keeps the error of gloo to itself when it has two devices here, and another host's processes cannot be seen.
        (1, 2, (75, ABORTED), HEARTBEAT + SOON, r"lost worker 1 at step \d+|worker 1 has been silent for 4 s: it is stopped"),
        (0, 1, (75, ABORTED), SOON, "lost worker 0|UNAVAILABLE: Failed to send RPC to coordination service"),
    ],
    ids=["worker", "worker with two devices", "chief"],
)
def test_the_death_of_another_host_s_worker(
    hosts: dict[str, str], culprit: int, devices: int, codes: tuple[int, ...], within: float, message: str
) -> None:
    with workers(SCRIPT, 2, "fault=killed", f"who={culprit}", "steps=2000", devices=devices, env=hosts) as running:
        ended = [worker.wait(60) for worker in running]
    survivor = ended[1 - culprit]
    assert ended[culprit].code == KILLED and survivor.code in codes, survivor.output
    assert survivor.time - moment_of_fault(ended) < within
    assert re.search(message, survivor.output), survivor.output
