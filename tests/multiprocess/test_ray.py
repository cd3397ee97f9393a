"""ray_job.py on several nodes of Ray: whatever happens to them, no step is lost, and the losses are those of one device."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
from processes import run_workers
from test_elastic import NUM_ROWS, STEPS_OF_EPOCH, steps_of

HERE = Path(__file__).parent
SCRIPT = HERE / "elastic_worker.py"
#: What happens: the seconds between steps, the number of epochs, and of the workers by which steps are taken, in turns.
EVENTS = {"killed": (0.1, 12, [2]), "drained": (0.2, 40, [2]), "resized": (0.5, 75, [2, 3, 2])}


@pytest.mark.nightly(
    "tests/multiprocess/test_elastic.py::test_a_job_of_three_two_and_three_workers_takes_the_steps_of_one_device"
)
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not in the lock: pip install 'ray[train]==2.60.*'")
@pytest.mark.parametrize("event", EVENTS)
def test_ray_goes_on_with_the_losses_of_one_device(event: str, tmp_path: Path) -> None:
    pause, num_epochs, numbers = EVENTS[event]
    [alone] = run_workers(SCRIPT, 1, tmp_path / "alone", "torchrun", 0, num_epochs, timeout=200)
    expected = steps_of(alone.output)
    assert len(expected) == num_epochs * STEPS_OF_EPOCH, alone.output

    examples = tmp_path / "examples"  # ray_job.py starts the program beside its folder
    (examples / "clusters").mkdir(parents=True)
    shutil.copy(SCRIPT, examples / "two_hosts.py")
    job = shutil.copy(HERE.parents[1] / "examples" / "clusters" / "ray_job.py", examples / "clusters")
    command = [sys.executable, HERE / "ray_cluster.py", job, tmp_path / "job", event, str(pause), str(num_epochs)]
    ended = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    lines = re.findall(r"(?m)(STEP \d+ \S+ \S+ \d+ workers)", ended.stdout)
    taken = steps_of("\n".join(lines))
    assert taken.keys() == expected.keys(), ended.stdout
    for step, (loss, rows) in taken.items():
        assert rows == expected[step][1] and loss == pytest.approx(expected[step][0], rel=1e-5), step
    assert sorted(row for step in range(1, STEPS_OF_EPOCH + 1) for row in taken[step][1]) == list(range(NUM_ROWS))
    told = Counter(lines)
    assert all(count <= int(line.split()[-2]) for line, count in told.items()), "a step was taken again"
    by_step = sorted({(int(line.split()[1]), int(line.split()[-2])) for line in lines})
    assert [number for number, _ in groupby(number for _, number in by_step)] == numbers
