"""Kill the workers of a training at random moments, and see that it ends exactly as if nothing had happened.

    python tests/multiprocess/chaos.py --runs 100 --kills 3 --workers 2 --replicas 1  # kills at any moment; SIGTERM now and then

The program is chaos_worker.py under `mirrored launch`. A run's moments come from its seed, and are
relative to what the program says that it does, so that a run that failed can be repeated, also on a slower machine.
"""

import argparse
import dataclasses
import functools
import random
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import chaos_checks as checks
import numpy as np
from chaos_checks import check_lives, check_rows, read_lives, read_results
from chaos_job import Fault, Hit, job


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run does, besides the faults."""

    num_workers: int = 2
    num_replicas: int = 1
    num_rows: int = 23
    num_epochs: int = 6
    options: tuple[object, ...] = ()

    def arguments(self) -> list[object]:
        return ["--rows", self.num_rows, "--epochs", self.num_epochs, *self.options]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    hits: list[Hit]
    seconds_to_step: list[float]
    steps_redone: list[int]
    num_attempts: int


@functools.cache
def undisturbed(setting: Setting) -> tuple[dict[int, list[int]], list[dict[str, np.ndarray]]]:
    """Return the rows of each step, and the result, of a run without faults."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        with job(folder, setting.num_workers, setting.num_replicas, *setting.arguments()) as running:
            assert running.end() == 0, "the undisturbed run failed"
        rows = check_lives(read_lives(folder))
        check_rows(rows, setting.num_rows, setting.num_epochs)
        return rows, read_results(folder, setting.num_workers)


def disturbed(setting: Setting, faults: Sequence[Fault]) -> Outcome:
    """Run with faults, and check all that must be true in the end."""
    expected_rows, expected = undisturbed(setting)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder, hits = Path(name), list[Hit]()
        with job(folder, setting.num_workers, setting.num_replicas, *setting.arguments()) as running:
            for fault in faults:
                if (hit := running.strike(fault, hits[-1] if hits else None)) is not None:
                    hits.append(hit)
            code = running.end()
            assert code == 0, f"the launcher ended with {code}"
            lives = read_lives(folder)
            rows = check_lives(lives)
            check_rows(rows, setting.num_rows, setting.num_epochs)
            assert rows == expected_rows, "the order of the data is another one"
            checks.check_same_bits(read_results(folder, setting.num_workers), expected)
            checks.check_commits(running.events)
            checks.check_preemptions(running.events, hits)
            num_attempts = 1 + max(event.attempt for event in running.events)
            return Outcome(hits, checks.seconds_to_step(running.events, hits), checks.steps_redone(lives), num_attempts)


# -- moments

#: How long after each moment a fault may come: what follows it takes about so long.
DELAYS = {
    "SPAWN": 0.03, "START": 1.2, "MEET": 0.6, "RESTORE": 0.15, "COMPILE": 1.5, "READ": 0.004, "RUN": 0.004, "STEP": 0.03,
    "SAVE": 0.15, "END": 0.3,
}  # fmt: skip
WITH_STEP = ("READ", "RUN", "STEP", "SAVE")
#: The last three are also what a run with files of its own for each worker meets.
KINDS = [
    *((moment, signal.SIGKILL) for moment in ("SPAWN", "START", "MEET", "RESTORE", "COMPILE", "RUN")),
    ("STEP", signal.SIGTERM),
    *((moment, signal.SIGKILL) for moment in ("END", "STEP", "SAVE", "READ")),
]


def random_faults(seed: int, num_faults: int, num_workers: int, num_steps: int) -> list[Fault]:
    """Choose moments: all kinds in turn over the seeds, at steps one after the other, so that each is met."""
    rng, width = random.Random(seed), max(1, (num_steps - 6) // num_faults)
    kinds = [KINDS[(seed * num_faults + number) % len(KINDS)] for number in range(num_faults)]
    rng.shuffle(kinds)
    faults = []
    for number, (moment, signal_number) in enumerate(sorted(kinds, key=lambda kind: kind[0] == "END")):
        step = 1 + number * width + rng.randrange(width) if moment in WITH_STEP else 0
        delay, victim = rng.uniform(0, DELAYS[moment]), rng.randrange(num_workers)
        victims = (victim,)
        if moment == "SPAWN":
            victims = (rng.randrange(num_workers + 1),)
        elif signal_number == signal.SIGKILL and rng.random() < 0.2:
            victims += tuple(other for other in range(num_workers) if other != victim)
        faults.append(Fault(moment, step, victims, delay, signal_number))
    return faults


def faults_around_saves(rng: random.Random, num_faults: int, num_workers: int) -> list[Fault]:
    """Choose moments around saves, in turn of each worker: while the state is copied, written, takes its place, and after."""
    steps, delays = (1, 4), [0.01, 0.05, 0.12]
    return [
        Fault("SAVE", 2 * i + rng.randrange(*steps), (i % num_workers,), rng.choice(delays) * rng.random())
        for i in range(num_faults)
    ]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in {"runs": 100, "kills": 3, "workers": 2, "replicas": 1, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    setting = Setting(options.workers, options.replicas)
    for seed in range(options.seed, options.seed + options.runs):
        faults = random_faults(seed, options.kills, options.workers, len(undisturbed(setting)[0]))
        outcome = disturbed(setting, faults)
        restarts = " ".join(f"{seconds:.1f}" for seconds in outcome.seconds_to_step)
        print(f"seed {seed}: {len(outcome.hits)} of {len(faults)} hit, {outcome.num_attempts} attempts, s to a step: {restarts}")


if __name__ == "__main__":
    main()
