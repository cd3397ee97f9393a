"""The end of a program, with pools of threads that still work. It fails when Python's private function moves."""

import subprocess
import sys

import pytest

from mirrored._checkpoint import shutdown

pytestmark = pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 1),
    reason="this Python starts no threads at a program's end: an error is logged",
)

#: The module by itself: importing jax takes a second.
LOAD = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("_shutdown", {shutdown.__file__!r})
_shutdown = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_shutdown)
"""
PROGRAM = """
import threading, time
from concurrent.futures import ThreadPoolExecutor

def work():
    with ThreadPoolExecutor() as pool:
        time.sleep(0.3)
        print(pool.submit(lambda: "done").result(), flush=True)

thread = threading.Thread(target=work)
if {is_waited_for}:
    _shutdown.before_pools_end(thread.join)
thread.start()
{end}
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOAD + program], capture_output=True, text=True, timeout=50)


def test_pools_take_work_until_the_function_has_come_back() -> None:
    for end, code, is_waited_for in (
        ("", 0, False),
        ("", 0, True),
        ("raise ValueError('the end')", 1, True),
        ("raise SystemExit(7)", 7, True),
    ):
        ended = run(PROGRAM.format(is_waited_for=is_waited_for, end=end))
        assert ended.returncode == code
        assert ended.stdout == ("done\n" if is_waited_for else "")
        assert ("cannot schedule new futures" in ended.stderr) != is_waited_for, ended.stderr


def test_an_error_is_shown_and_what_else_is_to_be_done_is_done() -> None:
    program = """
def interrupted():
    raise KeyboardInterrupt

_shutdown.before_pools_end(lambda: print("the rest", flush=True))
_shutdown.before_pools_end(interrupted)
"""
    ended = run(program)
    assert ended.returncode == 0 and ended.stdout == "the rest\n" and "KeyboardInterrupt" in ended.stderr


def test_it_does_not_matter_who_imports_the_pools_first() -> None:
    program = "_shutdown.before_pools_end(lambda: thread.join())\n" + PROGRAM.format(is_waited_for=False, end="")
    ended = run(program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
