"""Damages to the page of a run."""

MUTANTS = [
    ("_report/facts.py", "by_worker.get(replica.worker, first)", "first",
     "tests/_report/test_saved.py::test_files_of_workers_are_one_page"),
]  # fmt: skip
