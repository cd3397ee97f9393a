"""What forks the workers of tests: it has imported all that takes seconds, so that a new worker is there at once.

processes.py starts it, with a socket. A request has the command line and the environment, and brings the two logs as file
descriptors; the answer is the worker's number, and later how it has ended. A forked worker is the main program of a process
of its own, which ends as any Python program does; only what Python and JAX read from the environment when they start is set
here. When the tests' process is gone, all workers end.
"""

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import types
import warnings

connection = socket.socket(fileno=int(sys.argv[1]))


def answer(**what: object) -> None:
    connection.send(json.dumps(what).encode())


def serve() -> tuple[dict, list[int]]:
    """Fork until the tests end; return in each worker, with its request and its logs."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running = set()
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 1024)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            running.discard(ended[0])
            answer(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]), time=time.time())
        if connection in ready:
            message, logs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            if not message:
                for worker in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(worker, signal.SIGKILL)
                os._exit(0)
            worker = os.fork()
            if not worker:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wakes)
                connection.close()
                return json.loads(message), list(logs)
            for log in logs:
                os.close(log)
            running.add(worker)
            answer(started=worker)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # JAX's about fork: its backends have not started
    for module in ("grain", "jax", "optax", "mirrored._public", "compile_cache"):
        __import__(module)
    gc.collect()
    gc.freeze()  # what is imported stays: no worker looks at it, which would copy it
    request, logs = serve()

# The compile cache of the tests is not locked.
warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
os.setsid()  # so that its children can be killed with it
for descriptor, log in enumerate(logs, 1):
    os.dup2(log, descriptor)
    os.close(log)
sys.argv = request["command"]
os.environ.clear()
os.environ.update(request["env"])
faulthandler.enable()
for name in sys.modules["jax"].config.values:
    if text := os.environ.get(name.upper()):
        sys.modules["jax"].config.update(name, int(text) if text.lstrip("-").isdigit() else text)
sys.path[0] = os.path.dirname(sys.argv[0])
program = sys.modules["__main__"] = types.ModuleType("__main__")
program.__file__ = sys.argv[0]
with open(sys.argv[0]) as source:
    code = compile(source.read(), sys.argv[0], "exec")
exec(code, program.__dict__)
