"""Damages to how workers notice what goes wrong: no hang without a message, no wrong number."""

MUTANTS = [
    ("_workers/guard.py", "        if parted:\n", "        if parted and len(parted) == len(view.positions):\n",
     "tests/_workers/test_guard.py::test_programs_in_another_order_end_the_job_with_one_wherever_the_workers_are"),
    ("_workers/guard.py", "require_same_history(self._await_ends(), self._shutdown.trails)", "bool(self._await_ends())",
     "tests/_workers/test_guard.py::test_no_job_ends_well_whose_workers_have_done_different_things"),
    ("_workers/guard.py", "told.detail == verdict.detail[-MAX_TEXT:]", "bool(told.detail)",
     "tests/_workers/test_guard.py::test_a_traceback_that_all_workers_print_is_printed_once"),
    ("_workers/guard.py", " and self._coordination.peek(CALL) != DONE", "",
     "tests/_workers/test_guard.py::test_a_silent_worker_whose_heartbeats_cease_is_lost_unless_all_have_come_to_their_ends[done]"),
    ("_workers/verdict.py", ".partition(_OF_CALLBACK)[0]", "",
     "tests/_workers/test_guard.py::test_an_error_of_the_program_is_no_loss_whatever_it_speaks_of"),
    ("_workers/shutdown.py", "self.arm_last_resort(code)", "pass",
     "tests/_workers/test_guard.py::test_whatever_blocks_while_a_worker_leaves_does_not_keep_it"),
    ("_workers/stall.py", "is_patient and worker not in silent", "is_patient",
     "tests/_workers/test_stall.py::test_a_stopped_worker_is_late_wherever_it_was"),
]  # fmt: skip
