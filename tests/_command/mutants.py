"""Damages to the launcher and to `mirrored check`."""

MUTANTS = [
    ("_command/keeper.py", 'line.startswith(b"+")', 'line.startswith(b"-")',
     "tests/_command/test_group.py::test_no_orphans_when_the_launcher_is_killed"),
    ("_command/check.py", "rtol=tolerance", "rtol=0.01",
     "tests/_command/test_check.py::test_a_wrong_sum_is_found"),
]  # fmt: skip
