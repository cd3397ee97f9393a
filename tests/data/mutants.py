"""Damages to the input: each record once, in its order, and none that is damaged."""

MUTANTS = [
    ("data/_records/record_reader.py", "if checksum != expected:", "if False:",
     "tests/data/test_tfrecord.py::test_damage_says_where_and_what_comes_before_is_read"),
    ("data/_sources/numpy_dataset.py", "dataset._next_epoch[0] = first +", "first = first +",
     "tests/data/test_position.py::test_the_passes_after_a_restart_have_the_orders_of_the_unbroken_run"),
    ("data/_sharing/files.py", '"files": [first, None, step]', '"files": [first, None, step + 1]',
     "tests/data/test_plan.py::test_every_record_exactly_once_and_paired_whatever_the_pipeline"),
    ("data/_sharing/files.py", 'self._num_begun(mine, part["state"])', "self._num_begun(mine, self._before)",
     "tests/data/test_position.py::test_any_number_of_workers_goes_on_with_files"),
    ("data/_sharing/rows.py", "place[len(part) :] = 0", "place[len(part) :] = 1",
     "tests/data/test_dataset.py::test_the_rows_of_the_replicas_in_order_are_the_batch"),
    ("data/_iterator.py", "if not isinstance(error, KeyboardInterrupt) or not self._goes_on():", "if True:",
     "tests/data/test_prefetch.py::test_ctrl_c_in_a_pipeline_that_nobody_reads_ahead_loses_none_or_says_so"),
    ("data/_passes.py", "is_empty = is_whole", "is_empty = True",
     "tests/data/test_sizes.py::test_a_pass_that_made_steps_before_or_was_ended_by_the_program_says_nothing"),
    ("data/_records/value_places.py", "tag >= 0x80 or ", "",
     "tests/data/test_example.py::test_what_no_writer_writes_has_no_places"),
    ("data/_sharing/agree.py", "reshape(-1).view(np.uint8), checksum)", "reshape(-1).view(np.uint8)[:100_000], checksum)",
     "tests/data/test_plan.py::test_another_record_anywhere_in_any_array_of_a_batch_is_seen"),
]  # fmt: skip
