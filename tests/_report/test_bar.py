"""The progress bar passes all batches on, says what the loop waits for, and is the chief's alone."""

import sys
import types

import numpy as np
import pytest

import mirrored as mr
from mirrored._report import bar


def test_it_passes_batches_on_and_shows_steps_and_the_share_of_the_input(capsys, monkeypatch, strategy2):
    now = iter(range(100))
    monkeypatch.setattr(bar, "time", types.SimpleNamespace(perf_counter=lambda: float(next(now))))
    dataset = strategy2.distribute_dataset([np.full(2, i) for i in range(4)])
    taken = [int(strategy2.reduce("sum", batch, axis=0)) for batch in mr.progress(dataset, description="epoch 1")]
    assert taken == [0, 2, 4, 6]
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith("epoch 1: 100%") and "4/4" in last and "step" in last and "input 33%" in last  # 4 of 12 seconds


def test_a_loop_may_be_left_and_a_length_be_unknown_or_given_and_errors_come_through(capsys):
    def endless():
        yield from range(3)
        raise OSError("the file is gone")

    for number in mr.progress(endless()):
        if number == 2:
            break
    assert "2step" in capsys.readouterr().err  # the third was not finished
    with pytest.raises(OSError, match="the file is gone"):
        list(mr.progress(endless()))
    capsys.readouterr()
    assert list(mr.progress(iter("ab"), total=5)) == ["a", "b"]
    assert "2/5" in capsys.readouterr().err


def test_only_the_chief_shows_it(capsys, monkeypatch):
    for is_chief in (True, False):
        monkeypatch.setattr(bar, "joint_strategy", lambda is_chief=is_chief: types.SimpleNamespace(is_chief=is_chief))
        assert list(mr.progress([1, 2])) == [1, 2]
        assert ("2/2" in capsys.readouterr().err) is is_chief


def test_without_tqdm_the_line_to_write_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"mr\.progress needs tqdm, which is not installed: pip install tqdm"):
        mr.progress([1])
