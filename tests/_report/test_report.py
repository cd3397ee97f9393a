"""The report: what it says of a run, that it is one whole file, and that it disturbs nothing."""

import dataclasses
import os
import re
import xml.etree.ElementTree
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from strategies import variable

import mirrored as mr
from mirrored import _process
from mirrored._jax import user_code
from mirrored._report.facts import Replica, facts_of
from mirrored._report.page import page
from mirrored._report.pictures import MAX_DEVICES, MAX_PARTS, split, topology


def check(text: str) -> None:
    """Fail unless a page is whole, with each tag closed where it should be, and needs nothing from elsewhere."""
    root = xml.etree.ElementTree.fromstring(re.sub("<!DOCTYPE html>|<meta[^>]*>", "", text))
    assert {"table", "style"} <= {element.tag for element in root.iter()} and 'class="picture"' in text
    assert not re.search(r"<script|<link|<img|https?://|@import|url\(", text)


def section(text: str, name: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.split(f"<h2>{name}</h2>")[1].split("</section>")[0]))


def trained(strategy: mr.Strategy) -> object:
    """Train a bit; return what must stay alive for the report."""
    w = variable(np.zeros(256, "float32"), strategy, name="<w>")
    optimizer = mr.Optimizer(optax.sgd(0.1), [w])

    def train_step(x: object) -> object:
        gradients = mr.grad(lambda: mr.losses.compute_average_loss(x @ w), [w])()
        optimizer.apply_gradients(gradients)

    rows = strategy.make_numpy_dataset(np.ones((7, 256), "float32")).batch(5)
    batches = strategy.distribute_dataset(rows)
    for batch in batches:
        strategy.run(train_step, args=(batch,))
    return w, optimizer, batches


@pytest.mark.parametrize("strategy", [1, 3], indirect=True)
def test_the_page_says_what_the_run_was(strategy: mr.MirroredStrategy, tmp_path: Path) -> None:
    kept = trained(strategy)
    strategy.assert_mirrored()
    path = mr.report(strategy, tmp_path / "new" / "run.html")
    assert path is not None and sorted(path.parent.iterdir()) == [path]
    text = path.read_text()
    check(text)
    count = strategy.num_replicas_in_sync
    assert f"MirroredStrategy: {count} replica" in text and "<w>" not in text
    devices = section(text, "Devices")
    assert all(f"replica {number}" in devices and f"cpu:{number}" in devices for number in range(count))
    programs = section(text, "Programs")
    assert "train_step 2 0 first call of the function" in programs
    assert "train_step 2 0 the argument `x` changed from shape" in programs
    communication = section(text, "Communication")
    if count == 1:
        assert "1 replica " in re.sub(r"<[^>]+>", " ", text) and "No program communicates." in communication
    else:
        assert f"{Path(__file__).name}:" in communication and "1.0 KiB" in communication
    assert "&lt;w&gt; (256,) float32 1.0 KiB mirrored" in section(text, "Memory")
    copies = section(text, "Copies")
    assert ("one replica" in copies) if count == 1 else re.search(r"All copies of \d+ mirrored variables .* equal.* ms", copies)
    assert kept


def test_the_rows_of_a_batch_are_drawn_as_they_are_split(strategy3: mr.MirroredStrategy) -> None:
    kept = trained(strategy3)
    [dataset] = facts_of(strategy3).datasets
    assert (dataset.name, dataset.num_rows) == ("NumpyDataset", 5) and dataset.how.startswith("each global batch is cut into 3")
    assert re.findall(r">(\d: \d)<", split(5, 3)) == ["0: 2", "1: 2", "2: 1"]
    assert re.findall(r'class="part" style="flex: (\d)"', split(5, 3)) == ["2", "2", "1"]
    assert re.findall(r">(\d)<", split(None, 3)) == ["0", "1", "2"] and split(None, MAX_PARTS + 1) == ""
    assert ">0<" not in split(1, 2) and "1: 0" not in split(1, 2)  # a replica without rows has no place
    assert kept


def test_copies_that_differ_and_warnings_are_shown(strategy2: mr.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "warned", type(_process.warned)())
    assert "None." in section(page(facts_of(strategy2)), "Warnings")
    for _ in range(2):
        with pytest.warns(mr.RecompilationWarning):
            user_code.warn("compiled <again>", mr.RecompilationWarning)
    facts = facts_of(strategy2)
    assert "compiled &lt;again&gt; (2 times)" in section(page(facts), "Warnings")
    w = variable(np.zeros(2, "float32"), strategy2, name="w")
    strategy2.assert_mirrored()
    assert "equal" in section(page(facts_of(strategy2)), "Copies")
    parts = [jax.device_put(np.full(2, number, "float32"), device) for number, device in enumerate(strategy2.devices)]
    w._array = jax.make_array_from_single_device_arrays((2,), w.value.sharding, parts)
    with pytest.raises(mr.ReplicasDivergeError):
        strategy2.assert_mirrored()
    assert "the copies of variable" in section(page(facts_of(strategy2)), "Copies")


def test_a_warning_is_remembered_although_it_is_raised_and_old_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "warned", type(_process.warned)())
    for number in range(102):
        with pytest.raises(UserWarning, match=f"w {number}"):
            user_code.warn(f"w {number}")
    assert (len(_process.warned), next(iter(_process.warned))) == (100, "w 2")


def test_nothing_happened_yet_and_many_devices() -> None:
    facts = facts_of(mr.MirroredStrategy(["cpu:7", "cpu:5", "cpu:6"]))  # functions of other tests ran elsewhere
    text = page(facts)
    for name, sentence in {
        "Data": "No dataset", "Programs": "No program", "Communication": "No program communicates",
        "Memory": "no variables",
    }.items():  # fmt: skip
        assert sentence in section(text, name)
    of_gpus = dataclasses.replace(facts, replicas=tuple(replica._replace(in_use=10, limit=100) for replica in facts.replicas))
    assert "10 B of 100 B" in section(page(of_gpus), "Memory"), "which arrays without variables may take"
    replicas = [Replica(number, f"gpu:{number}", "H200", number // 8, 10, 100) for number in range(MAX_DEVICES + 8)]
    drawn = topology(replicas)
    assert "and 8 more replicas" in drawn and drawn.count(">worker ") == MAX_DEVICES // 8 and "of 40<" in drawn


def test_a_report_replaces_the_last_one_and_leaves_nothing_when_it_fails(strategy2, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mr.report(strategy2) == Path("mirrored-report.html")
    mr.report(strategy2)
    assert os.listdir(tmp_path) == ["mirrored-report.html"]
    before = Path("mirrored-report.html").read_text()

    def fail(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        mr.report(strategy2)
    monkeypatch.setattr(type(strategy2), "is_chief", property(lambda self: False))
    assert mr.report(strategy2, tmp_path / "run.html") is None, "only the chief writes"
    assert os.listdir(tmp_path) == ["mirrored-report.html"] and Path("mirrored-report.html").read_text() == before


def test_functions_are_in_it_with_the_collectives_of_their_steps(strategy2: mr.MirroredStrategy) -> None:
    def step(x: object) -> object:
        return mr.get_replica_context().all_reduce("sum", x)

    @mr.function
    def two_steps(x: object) -> object:
        return strategy2.run(step, args=(strategy2.run(step, args=(x,)),))

    two_steps(np.ones(256, "float32"))
    [program] = [program for program in facts_of(strategy2).programs if program.name.endswith("two_steps")]
    assert [(exchange.name, exchange.count, exchange.num_bytes) for exchange in program.exchanges] == [("all-reduce", 2, 2048)]
    other = mr.MirroredStrategy(["cpu:2", "cpu:3"])
    assert not [program for program in facts_of(other).programs if program.name.endswith("two_steps")]
