"""Damages to collectives, values and programs in flight."""

MUTANTS = [
    ("_replicas/rows_drawn.py", " and list(least) == sorted(least, reverse=True)", "",
     "tests/_replicas/test_rows_drawn.py::test_what_is_not_by_rows_differs_by_replica_and_is_one_devices_on_the_first"),
    ("_replicas/reductions.py", "axis) < rows", "axis) <= rows",
     "tests/_replicas/test_cross_replica.py::test_the_padding_is_never_seen_whatever_is_in_it_nor_taken_for_data"),
    ("_replicas/reductions.py", "mean = total / float(count)", "mean = total / count",
     "tests/_replicas/test_cross_replica.py::test_a_mean_neither_overflows_nor_rounds_to_zero"),
    ("_replicas/placement.py", "on_difference(position, sorted(", "on_difference(column, sorted(",
     "tests/_replicas/test_placement.py::test_workers_that_differ_are_named"),
    ("_replicas/in_flight.py", "len(_process.in_flight) < MAX_IN_FLIGHT:\n", "len(_process.in_flight) <= MAX_IN_FLIGHT:\n",
     "tests/_replicas/test_in_flight.py::test_older_programs_are_waited_for_before_there_are_too_many"),
    ("_replicas/collectives.py", "is_packed = self.packs or self.bytes_per_pack", "is_packed = True",
     "tests/_replicas/test_platforms.py::test_a_platform_that_nobody_named_gets_a_sum_of_each_array_and_the_same_numbers"),
    ("_replicas/per_replica.py", "    if getattr(children[0], \"ndim\", None) == rank:\n", "    if True:\n",
     "tests/_replicas/test_per_replica.py::test_a_per_replica_is_never_read_along_another_axis[vmap-3]"),
    ("_replicas/cross_replica.py", "next(totals) + (total >> shifts.step)", "next(totals)",
     "tests/_replicas/test_cross_replica.py::test_a_sum_of_integers_is_exact_or_refused"),
]  # fmt: skip
