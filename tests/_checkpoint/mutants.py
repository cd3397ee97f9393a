"""Damages to what outlives a program: no step is lost, and none that is damaged is taken."""

MUTANTS = [
    ("_checkpoint/array_files.py", "bad = zipped.testzip()", "bad = None",
     "tests/_checkpoint/test_checkpoint.py::test_a_flipped_bit_of_a_step_is_found_or_says_nothing_of_the_arrays"),
    ("_checkpoint/files.py", "_sync(self.root)", "pass",
     "tests/_checkpoint/test_checkpoint.py::test_a_step_survives_a_power_failure_before_it_counts"),
    ("_checkpoint/state.py", 'np.array(leaf, dtype=leaf.dtype.newbyteorder("="))', "np.asarray(leaf)",
     "tests/_checkpoint/test_checkpoint.py::test_a_save_does_not_see_what_later_steps_do"),
    ("_checkpoint/state.py", "by_worker[worker] if len(by_worker)", "by_worker[0] if len(by_worker)",
     "tests/_checkpoint/test_checkpoint.py::test_each_worker_gets_back_its_own_position"),
    ("_checkpoint/checkpoint.py", "self._files.claim()", "pass",
     "tests/_checkpoint/test_sole_writer.py::test_a_second_program_is_told_so_changes_nothing_and_may_read"),
    ("_checkpoint/preemption.py", "max((step + 1 for", "max((step for",
     "tests/_checkpoint/test_preemption.py::test_all_workers_leave_at_one_step_that_none_has_passed"),
    ("_checkpoint/checkpoint.py", "state.require_readable(saved)", "pass",
     "tests/_checkpoint/test_checkpoint.py::test_a_record_that_no_save_writes_is_damage_before_anything_is_assigned"),
]  # fmt: skip
