"""Damages to plans: bytes, overlap, what fits."""

MUTANTS = [
    ("_plan/modules.py", "self._ended.get(instruction.name, instruction.result)", "instruction.result",
     "tests/_plan/test_modules.py::test_a_gpu_s_collectives_and_what_runs_beside_them"),
    ("_plan/modules.py", " or callee[1].startswith(_GOES_ON)", "",
     "tests/_plan/test_modules.py::test_a_collective_in_a_tpu_s_fusions_counts_once_with_its_kind_and_bytes"),
    ("_plan/plan.py", "return local + self.links - min(self.hidden, local)", "return local + self.links",
     "tests/_plan/test_plan.py::test_a_sum_costs_more_on_more_devices_and_less_beside_other_work"),
    ("_plan/modules.py", "return int(known[1])", "return 1",
     "tests/_plan/test_modules.py::test_what_is_in_a_loop_runs_as_often_as_the_loop_and_one_branch_of_a_condition"),
    ("_plan/plan.py", "not program.failure and", "",
     "tests/_plan/test_plan.py::test_a_program_that_does_not_fit_says_by_how_much"),
]  # fmt: skip
