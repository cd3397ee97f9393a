"""Damages to the launcher and to `mirrored check`."""

MUTANTS = [
    ("_command/keeper.py", 'line.startswith(b"+")', 'line.startswith(b"-")',
     "tests/_command/test_group.py::test_no_orphans_when_the_launcher_is_killed"),
    ("_command/check_sums.py", "rtol=tolerance", "rtol=0.01",
     "tests/_command/test_check_sums.py::test_a_wrong_sum_is_found"),
    ("_command/check_cluster.py", "least <= _MOST_SECONDS", "least <= 1000",
     "tests/_command/test_check_cluster.py::test_clocks"),
    ("_command/check_folder.py", "if lines.worker and not problem:", "if lines.worker and problem:",
     "tests/_command/test_check.py::test_all_that_is_wrong_with_another_worker_is_said_by_both"),
]  # fmt: skip
