"""Damages to how workers find each other."""

MUTANTS = [
    ("_cluster/gathering.py", "peer.answer(failure or GO)", "peer.answer(WAITING if failure else GO)",
     "tests/_cluster/test_meeting.py::test_a_missing_worker_is_named_everywhere"),
    ("_cluster/gathering.py", "(is_foreign or hello.is_late", "(hello.is_late",
     "tests/_cluster/test_meeting.py::test_who_names_another_chief_is_turned_away_and_ends_nobody_but_itself"),
    ("_cluster/meeting.py", "isinstance(answer, bytes):\n        raise", "False:\n        raise",
     "tests/_cluster/test_meeting.py::test_a_port_of_another_program_is_an_error_at_once"),
]  # fmt: skip
