"""A forked child ends by itself and leaves to its parent what JAX would end."""

from processes import run_program

CHILD = """
import os, sys, warnings
import jax.numpy as jnp
import mirrored as mr
warnings.simplefilter("ignore")
def child_of(how):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    how()
    sys.exit(3)
def compute():
    assert float(jnp.ones(3).sum()) == 3.0
def fail():
    raise ValueError("of the child")
import mirrored._public  # before JAX starts, as a server that forks workers
started = child_of(compute)
compute()
mr.MirroredStrategy()
print("CODES", started, child_of(lambda: None), child_of(fail), flush=True)
compute()
"""


def test_a_forked_child_has_its_own_exit_code_and_one_from_before_jax_s_start_may_use_jax() -> None:
    """Without us a child of a process in which JAX runs ends by SIGSEGV."""
    done = run_program(CHILD)
    assert done.returncode == 0, done.stderr
    assert "CODES 3 3 1" in done.stdout, done.stdout + done.stderr
