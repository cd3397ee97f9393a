"""Damages to variables: copies that differ, values that are overwritten."""

MUTANTS = [
    ("_variables/equal_copies.py", "if all(len(set(of_worker)) == 1 for of_worker in copies):", "if True:",
     "tests/_variables/test_equal_copies.py::test_copies_that_differ_by_worker_only_are_blamed_on_machines_that_differ"),
    ("_variables/storage.py", "if borrowed:", "if False:",
     "tests/_variables/test_threads.py::test_what_a_reader_holds_is_not_overwritten_and_costs_a_copy_only_meanwhile"),
    ("_variables/equal_copies.py", "any(len(set(copies)) > 1 for _, copies in own)", "False",
     "tests/_variables/test_equal_copies.py::test_one_flipped_bit_is_found_and_named"),
    ("_variables/assignment.py", "if spec.is_on_read or axis is None:", "if True:",
     "tests/parity/test_programs.py::test_the_numbers_are_those_of_one_device[Counted...AggregatedAssignment-R3, odd]"),
    ("_variables/storage.py", "                first.block_until_ready()", "                pass",
     "tests/_variables/test_storage.py::test_after_out_of_memory_everything_lost_is_named_once_and_training_goes_on[3]"),
]  # fmt: skip
