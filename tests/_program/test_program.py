"""Programs: the first run, which JAX starts in Python."""

import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._program import program


@pytest.mark.parametrize("where", ["_run_python_pjit", "cache_miss"])
def test_ctrl_c_in_the_first_run_of_a_program_comes_when_it_has_kept_the_new_values(where: str, strategy2: mr.Strategy) -> None:
    """JAX runs Python code there, when it has taken the old arrays over and the new ones are nowhere yet."""
    with strategy2.scope():
        w = mr.Variable(np.zeros(2, np.float32))
    hits: list[str] = []

    def interrupt_once(frame, event, argument) -> None:
        if event == "return" and frame.f_code.co_name == where and w.name in names_in(frame) and not hits:
            hits.append(where)
            signal.raise_signal(signal.SIGINT)

    def names_in(frame) -> list[str]:
        """Name the variable where the frame is in the run of a program."""
        while frame is not None and frame.f_code.co_name != "overwrite":
            frame = frame.f_back
        return [] if frame is None else [slot.name for slot in frame.f_locals["home"].slots]

    before = signal.getsignal(signal.SIGINT)
    sys.setprofile(interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy2.run(lambda: w.assign_add(np.ones(2, np.float32)))
    finally:
        sys.setprofile(None)
    assert hits == [where] and w.numpy().tolist() == [1, 1] and signal.getsignal(signal.SIGINT) is before


def test_where_nobody_handles_ctrl_c_nothing_is_delayed() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with program._delaying_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def run() -> None:
        with program._delaying_ctrl_c():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("kind", ["nans", "infs"])
def test_an_error_of_jaxs_search_for_nans_says_how_its_line_is_found(strategy2: mr.Strategy, kind: str, is_warm: bool) -> None:
    """Where a program has given its variables away, JAX cannot run it again to find the NaN, and raises another error."""
    with strategy2.scope():
        w = mr.Variable(np.zeros(2, np.float32))
    fine, bad = np.ones(2, np.float32), np.full(2, -1 if kind == "nans" else 0, np.float32)

    def step(x) -> None:
        w.assign_add(jnp.log(x))

    if is_warm:
        strategy2.run(step, args=(fine,))
    search = {"nans": jax.debug_nans, "infs": jax.debug_infs}[kind]
    with search(True), pytest.raises(FloatingPointError if kind == "nans" and not is_warm else RuntimeError) as caught:
        strategy2.run(step, args=(bad,))
    assert "`with mr.eager(), jax.debug_nans(True):`, which" in "".join(caught.value.__notes__)
    w.assign([0, 0])
    with mr.eager(), search(True), pytest.raises(FloatingPointError) as caught:
        strategy2.run(step, args=(bad,))
    assert "jnp.log(x)" in str(caught.traceback[-1].statement)
    assert not getattr(caught.value, "__notes__", []) and w.numpy().tolist() == [0, 0]
