"""Damages that only several processes show: the guard, neighbours, programs and checkpoints of several workers, the launcher."""

_HERE = "tests/multiprocess/"
_ENDS = _HERE + "test_faults.py::test_whatever_ends_one_worker_ends_all_at_once[{}]"
_REFUSED = _HERE + "test_mistakes.py::test_workers_that_do_not_do_the_same_are_told_and_can_go_on_together"
_MISTAKE = _HERE + "test_mistakes.py::test_mistakes_end_in_an_error_on_every_worker[{}]"
_ALONE = _HERE + "test_mistakes.py::test_the_chief_may_print_read_and_compute_alone_and_what_each_computed_otherwise_is_found"
_RANDOM = _HERE + "test_random_programs.py::test_programs_compute_on_two_workers_what_they_do_on_one"
_FAILED_SAVES = _HERE + "test_checkpoint_workers.py::test_what_fails_fails_on_all_workers"
_PREEMPTED = _HERE + "test_checkpoint_workers.py::test_a_signal_to_one_worker_lets_all_leave_at_one_step"
_RESTARTED = _HERE + "test_start.py::test_the_launcher_starts_all_again_after_a_death"
_SHARDED = _HERE + "test_sharded_workers.py::test_workers_that_share_out_the_update_go_on_from_one_device_and_back[2-2]"

MUTANTS = [
    ("_workers/guard.py", "self._coordination.put(VERDICT, verdict.encode())", "pass", _ENDS.format("raise hostile")),
    ("_workers/guard.py", "self._hooks[0](kind, error, trace)", "pass", _ENDS.format("raise MemoryError")),
    (
        "_workers/shutdown.py",
        "if verdict.wants_stacks:",
        "if False:",
        _HERE + "test_faults.py::test_a_hang_is_named_after_the_limit_with_all_stacks[1]",
    ),
    (
        "_workers/guard.py",
        "        if not dead:\n            return False\n",
        "        return False\n",
        _HERE + "test_faults.py::test_a_worker_that_dies_while_the_others_are_outside_of_steps_is_named",
    ),
    ("_workers/verdict.py", "return INTERRUPTED", "return FAILED", _ENDS.format("raise KeyboardInterrupt")),
    ("_workers/runtime.py", "atexit.register(guard.stop)", "pass", _ENDS.format("exit")),
    ("_workers/neighbours.py", "            return True", "            return False", _ENDS.format("killed")),
    ("_workers/neighbours.py", "process.host == self.own.host", "process.host != self.own.host", _ENDS.format("killed")),
    (
        "_workers/stall.py",
        "if not (late or sees_all) or any(others[worker].is_patient and worker not in quiet for worker in late):",
        "if False:",
        _HERE + "test_faults.py::test_what_ends_no_program_ends_no_job[slow compilation-args1-1]",
    ),
    (
        "_workers/progress.py",
        "self.started += 1",
        "self.started += 2",
        "tests/_workers/test_progress.py::test_it_waits_from_before_a_program_starts_until_its_result_is_there",
    ),
    (
        "_workers/joint_programs.py",
        "progress.did(what, digest(what).encode())",
        "pass",
        _MISTAKE.format("another variable assigned"),
    ),
    ("_workers/joint_programs.py", "    agree(name, text)\n", "", _REFUSED),
    ("_workers/same_program.py", "if all(own == seen[0][1] for _, own, *_ in seen):", "if True:", _REFUSED),
    ("_workers/same_program.py", "len(set(batches)) > 1", "len(set(batches)) > 2", _MISTAKE.format("batch of the chief")),
    ("_workers/same_program.py", "len(set(done)) > 1", "len(set(done)) > 2", _MISTAKE.format("order before a barrier")),
    (
        "_workers/coordination.py",
        "if any(other != name for other in names):",
        "if False:",
        _HERE + "test_mistakes.py::test_workers_that_part_end_with_a_message[barriers]",
    ),
    ("_replicas/placement.py", "jax.lax.axis_index(mesh.axis) == 0", "jax.lax.axis_index(mesh.axis) == 1", _RANDOM),
    ("_replicas/placement.py", "differ = rows != rows[0]", "differ = rows != rows", _REFUSED),
    ("_replicas/placement.py", "if row[column] != rows[0][column]", "if row[column] > rows[0][column] < 0", _ALONE),
    ("_variables/equal_copies.py", "column != usual", "column < 0", _MISTAKE.format("flipped bit")),
    ("_checkpoint/same_on_workers.py", "for report in reports}) > 1", "for report in reports}) > 2", _FAILED_SAVES),
    ("_checkpoint/same_on_workers.py", "if kinds != every[0]:", "if False:", _FAILED_SAVES),
    ("_checkpoint/same_on_workers.py", "if report[field] != first[field]:", "if False:", _FAILED_SAVES),
    ("_checkpoint/checkpoint.py", 'if not all(report["sees"] for report in reports):', "if False:", _FAILED_SAVES),
    ("_checkpoint/preemption.py", "self._save(step)", "pass", _PREEMPTED),
    ("_checkpoint/preemption.py", "sys.exit(PREEMPTED)", "sys.exit(1)", _PREEMPTED),
    ("_replicas/parts.py", "[: math.prod(shape)].reshape(shape)", "[-math.prod(shape) :].reshape(shape)", _SHARDED),
    ("_replicas/parts.py", "value, axis.size) for value in values]", "value, axis.size)[::-1] for value in values]", _SHARDED),
    ("launch.py", "_env.MIRRORED_ATTEMPT: attempt,", "_env.MIRRORED_ATTEMPT: 0,", _RESTARTED),
    ("launch.py", "if code == 0 or not budget.allows(attempt):", "if True:", _RESTARTED),
    ("launch.py", "used.add(port)", "port = 10_001", _RESTARTED),
    ("_command/group.py", "if code and not self._plan and not self._num_signals:", "if False:", _RESTARTED),
]
