"""Hosts with cables between them, which are cut: each is a network namespace of this machine."""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import Worker, wait_for_line, workers
from test_faults import ABORTED, HEARTBEAT, KILLED, SOON, listeners, moment_of_fault

SCRIPT = Path(__file__).with_name("on_host.py")
NAMES = [f"mirrored{os.getpid() % 10_000}{number}" for number in range(3)]
ADDRESSES = [f"10.78.{number}.1" for number in range(3)]
pytestmark = pytest.mark.slow


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def connect(here: int, there: int) -> None:
    """Plug a host's cable to another one in, whose end is called `to{there}`."""
    ip("-n", NAMES[here], "link", "set", f"to{there}", "up")
    ip("-n", NAMES[here], "route", "replace", ADDRESSES[there], "dev", f"to{there}", "src", ADDRESSES[here])


def disconnect(here: int, there: int) -> None:
    ip("-n", NAMES[here], "link", "set", f"to{there}", "down")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[..., dict[str, str]]]:
    """Make three hosts with a cable between each two, whose own names mean the loopback address, as on many clusters.

    Return what makes the environment of on_host.py from the numbers of the workers' hosts.
    """
    folders = [Path("/etc/netns") / name for name in NAMES]
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", NAMES[0]], capture_output=True, check=False).returncode:
        pytest.skip("needs root, the program ip, and a kernel that has network namespaces")
    try:
        for name in NAMES[1:]:
            ip("netns", "add", name)
        for number, (name, folder) in enumerate(zip(NAMES, folders, strict=True)):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/32", "dev", "lo")
        for here, there in itertools.combinations(range(3), 2):
            ends = ("netns", NAMES[here], "type", "veth", "peer", "name", f"to{here}", "netns", NAMES[there])
            ip("link", "add", f"to{there}", *ends)
            connect(here, there)
            connect(there, here)
        yield lambda *numbers: {"TEST_HOSTS": ",".join(f"{NAMES[number]}={ADDRESSES[number]}" for number in numbers)}
    finally:
        for name, folder in zip(NAMES, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another's hosts are in it
            folders[0].parent.rmdir()


Hosts = Callable[..., dict[str, str]]


@contextlib.contextmanager
def firewall(here: int, there: int) -> Iterator[None]:
    """Drop what a host sends to another one's ports that its kernel chooses: the chief's own port is none of them."""
    match = ("to", ADDRESSES[there], "ipproto", "tcp", "dport", "32768-60999")
    ip("-n", NAMES[here], "link", "add", "nowhere", "arp", "off", "type", "veth", "peer", "name", "sink")
    for end in ("nowhere", "sink"):
        ip("-n", NAMES[here], "link", "set", end, "up")
    ip("-n", NAMES[here], "route", "add", "default", "dev", "nowhere", "src", ADDRESSES[here], "table", "100")
    ip("-n", NAMES[here], "rule", "add", "pref", "10", *match, "lookup", "100")
    try:
        yield
    finally:
        ip("-n", NAMES[here], "rule", "del", "pref", "10")
        ip("-n", NAMES[here], "link", "del", "nowhere")


def wait_until_all_train(running: list[Worker]) -> None:
    for worker in running:
        wait_for_line(worker, "STEP 3 ")


def test_a_cut_between_two_workers_that_both_reach_the_chief_is_named(hosts: Hosts) -> None:
    with workers(SCRIPT, 3, "steps=100000", env=hosts(0, 1, 2)) as running:
        wait_until_all_train(running)
        disconnect(2, 1)
        cut = time.time()
        for one in [worker.wait(60) for worker in running]:
            assert one.code == 75 and one.time - cut < HEARTBEAT + SOON, one.output
            assert "leaves with code 75: lost the connection between workers 1, 2 at step" in one.output, one.output


UNREACHED = (
    r"worker ([02]) cannot reach worker ([02]) at 10\.78\.([02])\.1:\d+ \(\d tries\): nobody answers there, as where a fire"
)


def test_a_firewall_between_two_workers_is_named_within_seconds_and_at_the_limit(hosts: Hosts) -> None:
    with firewall(2, 0), workers(SCRIPT, 3, "limit=15", env=hosts(0, 1, 2)) as running:
        found = [wait_for_line(running[index], "WARNING " + UNREACHED, 30) for index in (0, 2)]
        assert not any(worker.has_ended.is_set() for worker in running), "long before the limit"
        ended = [worker.wait(60) for worker in running]
    for match in found:
        assert {match[1], match[2]} == {"0", "2"} and match[2] == match[3]
    for worker in ended:
        assert worker.code == 75, worker.output
        assert re.search(r"for 15 s, which is the limit\. .* " + UNREACHED, worker.output), worker.output
        assert worker.output.count("WARNING worker") == (worker.index != 1), worker.output


def test_it_is_named_too_when_the_kernel_gives_up_before_the_limit(hosts: Hosts) -> None:
    """Which it does after some 130 s; here sooner."""
    tries = ("sysctl", "-q", "-w", "net.ipv4.tcp_syn_retries=3")
    for name in (NAMES[0], NAMES[2]):
        subprocess.run(["ip", "netns", "exec", name, *tries], check=True)
    with firewall(2, 0), workers(SCRIPT, 3, env=hosts(0, 1, 2)) as running:
        for worker in [worker.wait(60) for worker in running]:
            assert worker.code == 75, worker.output
            assert re.search(f"lost a connection at step 0: .*all workers answered. {UNREACHED}", worker.output), worker.output


def test_a_job_across_hosts_listens_on_their_addresses_only_and_survives_a_short_cut(hosts: Hosts) -> None:
    with workers(SCRIPT, 2, "steps=200", devices=2, env=hosts(0, 1)) as running:
        wait_until_all_train(running)
        disconnect(1, 0)
        time.sleep(5.0)  # the cut is what is tested
        connect(1, 0)
        for worker, address, number in zip([worker.wait(60) for worker in running], ADDRESSES, (2, 1), strict=False):
            assert worker.code == 0 and "END 200.0 2" in worker.output, worker.output
            assert "cannot reach" not in worker.output and "does not reach" not in worker.output, worker.output
            found = listeners(worker.output)
            assert {host for host, _ in found} == {address} and len(found) == number, found


def test_both_sides_of_a_cut_end(hosts: Hosts) -> None:
    with workers(SCRIPT, 2, "steps=2000", env=hosts(0, 1)) as running:
        wait_until_all_train(running)
        disconnect(1, 0)
        cut = time.time()
        try:
            chief, other = [worker.wait(60) for worker in running]
        finally:
            connect(1, 0)
    for one, codes in ((chief, (75,)), (other, (75, ABORTED))):
        assert one.code in codes and one.time - cut < HEARTBEAT + SOON, one.output
    assert "worker 1 has been silent for 4 s: it is stopped, cut off, dead" in chief.output, chief.output
    assert re.search(r"leaves with code 75: lost worker 1 at step \d+", chief.output), chief.output
    message = "worker 0, which hosts the coordination service, has not answered worker 1 for 4 s: it is stopped"
    assert message in other.output, other.output


#: The culprit, the devices of each worker, the codes of the other, the seconds, and what it says.
DEATHS = [
    (1, 1, (75,), SOON, r"lost worker 1 at step \d+: a collective failed on worker 0, and worker 1 has not answered"),
    # XLA often keeps the error of gloo to itself when it has two devices here, and another host's processes cannot be seen.
    (1, 2, (75,), HEARTBEAT + SOON, r"leaves with code 75: lost worker 1 at step \d+"),
    (0, 1, (75, ABORTED), SOON, "lost worker 0|UNAVAILABLE: Failed to send RPC to coordination service"),
]


def test_the_death_of_another_host_s_worker(hosts: Hosts) -> None:
    """A worker, one with two devices, and the chief: three jobs at once."""
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                workers(SCRIPT, 2, "fault=killed", f"who={culprit}", "steps=2000", devices=devices, env=hosts(0, 1))
            )
            for culprit, devices, *_ in DEATHS
        ]
        for running, (culprit, _, codes, within, message) in zip(jobs, DEATHS, strict=True):
            ended = [worker.wait(60) for worker in running]
            survivor = ended[1 - culprit]
            assert ended[culprit].code == KILLED and survivor.code in codes, survivor.output
            assert survivor.time - moment_of_fault(ended) < within
            assert re.search(message, survivor.output), survivor.output
