"""Damages to how workers find each other."""

MUTANTS = [
    ("_cluster/gathering.py", "            if peer.hello:\n                self._tell(peer, peer.hello)\n", "            pass\n",
     "tests/_cluster/test_meeting.py::test_a_missing_worker_is_named_everywhere"),
    ("_cluster/meeting.py", "isinstance(answer, bytes) and not is_grpc(answer)", "False",
     "tests/_cluster/test_meeting.py::test_a_port_of_another_program_is_an_error_at_once"),
]  # fmt: skip
