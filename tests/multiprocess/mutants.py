"""Damages that only several processes show: hangs, records that are lost, numbers that differ by worker."""

_HERE = "tests/multiprocess/test_"
_ENDS = _HERE + "faults.py::test_whatever_ends_one_worker_ends_all_at_once[{}]"
_MISTAKE = _HERE + "mistakes.py::test_mistakes_end_in_an_error_on_every_worker[{}]"
_SAVES = _HERE + "checkpoint_workers.py::test_"

MUTANTS = [
    ("_workers/shutdown.py", "self._coordination.put(_VERDICT, verdict.encode())", "pass", _ENDS.format("raise hostile")),
    ("_workers/neighbours.py", "            return True", "            return False",
     "tests/_workers/test_neighbours.py::test_a_process_is_dead_when_it_has_ended_and_no_other_is_taken_for_it"),
    ("_workers/same_program.py", "if any(key != seen[0][1] for _, key, *_ in seen):", "if False:",
     _HERE + "mistakes.py::test_workers_that_do_not_do_the_same_are_told_and_can_go_on_together"),
    ("_workers/same_program.py", "len(set(batches)) > 1", "len(set(batches)) > 2", _MISTAKE.format("batch of the chief")),
    ("_variables/equal_copies.py", "column != usual", "column < 0", _MISTAKE.format("flipped bit")),
    ("_replicas/placement.py", "jax.lax.axis_index(mesh.axis) == 0", "jax.lax.axis_index(mesh.axis) == 1",
     _HERE + "same_results.py::test_workers_give_in_64_bits_what_one_gives_without_a_warning[2]"),
    ("_checkpoint/same_on_workers.py", "if kinds != every[0]:", "if False:", _SAVES + "what_fails_fails_on_all_workers"),
    ("_checkpoint/preemption.py", "self._checkpoint.save(step)", "pass",
     _SAVES + "a_signal_to_one_worker_lets_all_leave_at_one_step"),
    ("launch.py", "if code == 0 or not budget.allows(attempt):", "if True:",
     "tests/_command/test_group.py::test_restarts_end_with_the_budget_and_use_fresh_ports_of_their_own_or_the_one_given"),
]  # fmt: skip
