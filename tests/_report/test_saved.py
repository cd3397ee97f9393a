"""Facts in files are what was known, and the files of several workers are one page."""

import dataclasses
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored import launch
from mirrored._report.facts import Facts, facts_of, file_of, join_facts, load, save
from mirrored._report.page import page
from mirrored._variables.equal_copies import CopiesCompared


@pytest.fixture
def facts(strategy3: mr.MirroredStrategy) -> Facts:
    """Facts with something in each field."""
    with strategy3.scope():
        w = mr.Variable(np.zeros(2, "float32"), name="<w>")
    dataset = strategy3.distribute_dataset(strategy3.make_numpy_dataset(np.ones((90, 2), "float32")).batch(3))
    for batch in dataset:
        strategy3.run(lambda x: w.assign_add(mr.get_replica_context().all_reduce("sum", jnp.sum(x, 0))), args=(batch,))
    found = facts_of(strategy3)
    assert found.programs[0].exchanges and found.datasets and found.shares
    return dataclasses.replace(found, comparison=CopiesCompared(found.taken, 0.1, 1, ""), warnings=(("careful", 2),))


def of_worker(facts: Facts, worker: int, **changes: object) -> Facts:
    """Return what a worker of three knows, each of which has one of the devices."""
    replicas = [r._replace(worker=r.number, in_use=7 + worker if r.number == worker else None, limit=99) for r in facts.replicas]
    return dataclasses.replace(facts, worker=worker, num_workers=3, replicas=tuple(replicas), **changes)


def test_what_was_saved_is_what_was_known_in_a_file_for_each_worker(facts: Facts, strategy2, tmp_path) -> None:
    save(facts, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == facts
    bare = dataclasses.replace(facts, comparison=None, shares={}, datasets=(), programs=())
    save(bare, tmp_path / "b.json")
    assert load(tmp_path / "b.json") == bare
    path = tmp_path / "run" / "report.json"
    assert (file_of(path, 0, 1), file_of(path, 2, 3)) == (path, tmp_path / "run" / "report.2.json")
    assert mr.report(strategy2, path) == path
    found = load(path)
    assert found is not None and found.worker == 0 and len(found.replicas) == 2 and str(tmp_path) not in path.read_text()


def test_files_of_workers_are_one_page(facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = dict.fromkeys(facts.shares, 0.0)
    every = [of_worker(facts, i, num_steps=30 + i, shares=shares | {"waiting for input": i / 4}) for i in (0, 2)]
    for each in every:
        save(each, file_of(tmp_path / "report.json", each.worker, 3))
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "no.json").write_text("{")
    assert launch.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out == f"{tmp_path / 'report.html'}; without workers 1, whose files are not there\n"
    text = (tmp_path / "report.html").read_text()
    assert text == page(join_facts(every), every)
    assert [replica.in_use for replica in join_facts(every).replicas] == [7, None, 9]
    assert join_facts(every).warnings == (("careful", 4),)
    table = text.split("<h2>Time</h2>")[1].split("</section>")[0]
    rows = [re.sub("<[^>]*>", " ", row).split() for row in table.split("<tr>")[2:]]
    assert [row[:2] for row in rows] == [["0", "30"], ["2", "32"]] and "50%" in rows[1]
    assert launch.main(["report", str(tmp_path / "report.2.json"), "-o", str(tmp_path / "to" / "two.html")]) == 0
    assert "The last 32 steps of strategy.run" in (tmp_path / "to" / "two.html").read_text()


def test_what_is_no_run_is_one_line(facts: Facts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        assert launch.main(["report", str(tmp_path)]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("mirrored report: ") and not (tmp_path / "report.html").exists()
        return err

    assert "has no facts of a run" in refused() and "mr.report(strategy" in refused()
    save(facts, tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    for change, message in (
        ({"mirrored_report": 99}, "version 99"),
        ({"replicas": [[1]]}, "is damaged: TypeError"),
        ({"more": 1}, "is damaged: TypeError"),
        ({"profiled": 3}, "is damaged: AttributeError"),
        ({"warnings": [["x", "\x1b"]]}, "is damaged: ValueError"),
    ):
        (tmp_path / "a.json").write_text(json.dumps(data | change))
        assert message in refused(), change
    del data["programs"]
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert "is damaged: KeyError" in refused()
    for other in (facts, dataclasses.replace(facts, worker=1, replicas=facts.replicas[:2])):
        save(facts, tmp_path / "a.json")
        save(other, tmp_path / "b.json")
        assert "has the files of several runs" in refused()
    assert launch.main(["report", str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err
