"""Damages to how workers find each other."""

MUTANTS = [
    ("_cluster/gathering.py", "peer.answer(failure or GO)", "peer.answer(WAITING if failure else GO)",
     "tests/_cluster/test_meeting.py::test_a_missing_worker_is_named_everywhere"),
    ("_cluster/meeting.py", "isinstance(answer, bytes):\n        raise", "False:\n        raise",
     "tests/_cluster/test_meeting.py::test_a_port_of_another_program_is_an_error_at_once"),
]  # fmt: skip
