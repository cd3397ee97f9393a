"""Damages to the input: rows that are lost, repeated or mispaired, wrong positions, threads left behind, damage not seen."""

#: By the test that catches them: the file in `data`, a text in it, and what takes its place.
BY_TEST = {
    "test_plan.py::test_batches_that_are_noted_are_told_at_the_first_and_the_end_only": [
        ("_sharing/agree.py", " or self._num_batches == 1", ""),
        ("_sharing/agree.py", "if batch is None or not self._worker.is_noted", "if not self._worker.is_noted"),
    ],
    "test_plan.py::test_an_error_of_the_pipeline_comes_after_the_batches_before_it": [
        ("_sharing/steps.py", "if self._failure is not None and not self.steps:", "if self._failure is not None:"),
    ],
    "test_plan.py::test_workers_tell_of_several_batches_at_once": [
        ("_sharing/steps.py", "count = min(2 * count, layout.lookahead)", "count = 1"),
    ],
    "test_dataset.py::test_no_batch_is_taken_inside_a_function_that_is_traced": [
        ("_iterator.py", "if frames.is_traced():", "if False:"),
    ],
    "test_dataset.py::test_batches_by_number_end_at_their_length_and_have_a_position": [
        ("_sources/open.py", ' or not hasattr(type(dataset), "__iter__")', ""),
    ],
    "test_dataset.py::test_what_can_be_gone_through_only_once_is_said": [
        ("_passes.py", "if is_first and self._is_resumed else", "if True else"),
        ("_passes.py", "if is_first and self._is_resumed else", "if False else"),
        ("_passes.py", "if is_empty and self._elements._specs:", "if is_empty:"),
    ],
    "test_dataset.py::test_what_is_no_dataset": [
        ("_dataset.py", "dataset != () and all(", "any("),
        ("_dataset.py", "dataset != () and all(", "all("),
    ],
    "test_rounds.py::test_what_is_read_ahead_changes_no_order_of_another_iterator": [
        ("_passes.py", "self._source = self._later.open()", "self._source = self._elements.open()"),
        ("_sources/verbs.py", "done += total * place", "pass"),
        ("_sources/numpy_dataset.py", "self._passes[0] += num_passes * (self.num_epochs or 1)\n", "pass\n"),
    ],
    "test_sources.py::test_a_position_that_counts_per_replica_batches_of_another_size_is_refused": [
        ("_iterator.py", 'if state.get("sizes", sizes) != sizes:', "if False:"),
        ("_sharing/plan.py", "context is None or isinstance(dataset, NumpyDataset)", "context is None"),
    ],
    "test_tfrecord.py::test_damage_says_where_and_what_comes_before_is_read": [
        ("_records/record_reader.py", "if checksum != expected:", "if False:"),
        ("_records/record_reader.py", "if not wrong.size:", "if True:"),
        ("_records/record_reader.py", "record += len(frames.records)", "pass"),
    ],
    "test_tfrecord.py::test_records_longer_than_a_chunk_and_than_the_limit": [
        ("_records/record_reader.py", "if length > max_record_bytes:", "if length >= max_record_bytes:"),
    ],
    "test_tfrecord.py::test_records_as_long_as_they_may_be_take_their_own_memory_once": [
        ("_records/record_reader.py", "if missing > CHUNK_BYTES:", "if missing > 64 * CHUNK_BYTES:"),
        ("_records/record_reader.py", "None if computed == stored else", "None if True else"),
    ],
    "test_sources.py::test_examples_that_nothing_batches_are_refused_where_that_is_known": [
        ("_sources/not_batches.py", "if not is_single or not steps <= _SAME_ELEMENTS | _MAPS:", "if not is_single:"),
        ("_dataset.py", "if reason := why_single_rows(dataset, size) or", "if reason :="),
    ],
    "test_sources.py::test_what_may_make_batches_is_taken_for_them": [
        ("_sources/not_batches.py", ' and getattr(root, "batch_size", None) is None for', " for"),
    ],
    "test_sources.py::test_examples_of_torch_and_hugging_face": [
        ("_sources/not_batches.py", " and not isinstance(dataset, torch.IterableDataset)", ""),
        ("_sources/not_batches.py", " and length > 0)", ")"),
    ],
    "test_rounds.py::test_steps_are_taken_and_repeated_and_any_position_is_gone_on_from": [
        ("_sources/verbs.py", "        is_first = False\n", ""),
        ("_sources/verbs.py", "done[:mine] = [0] * mine", "pass"),
    ],
    "test_rounds.py::test_workers_take_and_repeat_the_same_steps_and_go_on_from_any[file]": [
        ("_passes.py", "self._extra if is_first else {}", "{}"),
        ("_passes.py", "self._extra if is_first else {}", "self._extra"),
    ],
    "test_rounds.py::test_ctrl_c_inside_an_iterator_of_rows_in_memory_ends_nothing": [
        (
            "_sources/numpy_dataset.py",
            "        if self._order is None or",
            "        self._place = epoch, row + 2, batch + 1, total + 1\n        if self._order is None or",
        ),
    ],
    "test_rounds.py::test_rows_in_memory_are_taken_mapped_and_repeated_as_in_tf_data": [
        ("_sources/numpy_dataset.py", "or self._order[0] != number", ""),
    ],
    "test_rounds.py::test_a_function_gets_batches_on_the_host_before_they_are_divided": [
        ("_sources/verbs.py", "except StopIteration as end:", "except ZeroDivisionError as end:"),
        ("_sources/open.py", "is_copied=bool(maps)", "is_copied=False"),
        ("_sources/numpy_dataset.py", "array[: self._rows_per_batch()].copy()", "array[: self._rows_per_batch()]"),
        ("_sources/open.py", " and not (own.maps or maps)", ""),
    ],
    "test_rounds.py::test_positions_in_endless_and_cut_rows": [
        ("_sources/numpy_dataset.py", "epoch * dataset._num_batches_of_epoch() + batch", "batch"),
    ],
    "test_tfrecord.py::test_an_error_in_a_batch_leaves_its_records_to_be_read": [
        ("_records/record_reader.py", "self.seek(*before)", "pass"),
    ],
    "test_tfrecord.py::test_damaged_compression_says_where": [
        ("_records/record_reader.py", 'raise zlib.error(f"the {self._compression} stream was cut short")', 'return b""'),
        ("_records/record_reader.py", 'raise zlib.error("something follows the end of the ZLIB stream")', "pass"),
    ],
    "test_tfrecord.py::test_every_record_of_every_file_in_order": [
        ("_records/record_reader.py", " or self._is_empty)", ")"),
    ],
    "test_tfrecord.py::test_runs_of_one_length_are_found_whatever_follows_them": [
        ("_records/record_reader.py", "or len(frames)\n", "and len(frames)\n"),
    ],
    "test_tfrecord.py::test_a_state_of_other_files_is_an_error": [
        ("_records/record_reader.py", "stream.seek(0, os.SEEK_END))) == count", "stream.seek(0, os.SEEK_END))) <= count"),
    ],
    "test_tfrecord.py::test_a_file_that_cannot_be_written_whole_is_not_written": [
        ("_records/tfrecord.py", "os.remove(partial)", "pass"),
    ],
    "test_tfrecord.py::test_files_may_be_a_path_paths_or_a_pattern": [
        ("_records/tfrecord.py", "sorted(glob.glob(path, recursive=True))", "glob.glob(path, recursive=True)[::-1]"),
        ("_records/tfrecord.py", "glob.glob(path, recursive=True)", "glob.glob(path)"),
    ],
    "test_tfrecord.py::test_batches_are_lists_across_the_borders_of_files": [
        ("_records/tfrecord.py", "len(records) < self._batch_size", "len(records) <= self._batch_size"),
    ],
    "test_tfrecord.py::test_a_state_is_of_the_same_files_in_the_same_order_wherever_their_folder_is": [
        ("_records/tfrecord.py", 'if fields.get("name", name) != name:', "if False:"),
    ],
    "test_tfrecord.py::test_the_rest_of_grain_follows": [
        ("_records/tfrecord.py", "batched = copy.copy(self)", "batched = self"),
    ],
    "test_example.py::test_records_that_do_not_fit_the_spec": [
        ("_records/value_places.py", "(2 if name in bools else 0x80)", "0x80"),
        ("_records/feature.py", "(values < low) | (values > high)", "values > high"),
        ("_records/feature.py", "set(map(len, lists)) != {1 if is_decoded else size}", "False"),
    ],
    "test_example.py::test_what_is_known_is_bounded": [
        ("_records/example.py", "known.misses += 1", "pass"),
    ],
    "test_example.py::test_equal_structures_in_several_orders_are_parsed_without_protobuf": [
        ("_records/example.py", "rows[~matching], matrix[~matching]", "rows[~matching], matrix[: (~matching).sum()]"),
    ],
    "test_example.py::test_values_that_no_example_can_hold": [
        ("_records/example.py", "int(array.max()) >= 2**63", "int(array.max()) > 2**63"),
    ],
    "test_example.py::test_a_number_of_two_bytes_is_not_read_as_two_numbers": [
        ("_records/value_places.py", "name in bools else 0x80)", "name in bools else 0x81)"),
    ],
    "test_example.py::test_what_no_writer_writes_has_no_places": [
        ("_records/value_places.py", "tag != FIRST or name in found", "tag != FIRST"),
        ("_records/value_places.py", "tag != FIRST or name in found", "name in found"),
        ("_records/value_places.py", "all(start < stop for start, stop in spans)", "True"),
        ("_records/value_places.py", "has_fixed_size and max(record[slice(*spans[0])]) < 0x80", "has_fixed_size"),
        ("_records/value_places.py", "if [tag for tag, _ in fields] != tags:", "if len(fields) != len(tags):"),
        ("_records/value_places.py", "tag >= 0x80 or ", ""),
    ],
    "test_example.py::test_features_that_are_none": [
        ("_records/feature.py", "bool((flat == flat.astype(dtype)).all())", "True"),
    ],
    "test_dataset.py::test_each_pass_has_another_order_and_each_run_the_same": [
        ("_sources/numpy_dataset.py", "default_rng([self.shuffle_seed, epoch])", "default_rng([self.shuffle_seed])"),
        (
            "_sources/numpy_dataset.py",
            "self._dataset._passes[0] += self._dataset.num_epochs or 1",
            "self._dataset._passes[0] += 1",
        ),
    ],
    "test_position.py::test_the_passes_after_a_restart_have_the_orders_of_the_unbroken_run": [
        ("_sources/numpy_dataset.py", "dataset._passes[0] = first +", "first = first +"),
    ],
    "test_dataset.py::test_batches_are_the_rows_in_order": [
        ("_sources/numpy_dataset.py", "(dataset._rows_per_batch() if dataset.drop_remainder else 1)", "1"),
        ("_sources/numpy_dataset.py", "(rest > 0 and not self.drop_remainder)", "(rest > 0)"),
    ],
    "test_position.py::test_a_state_that_does_not_fit_changes_nothing": [
        ("_sources/numpy_dataset.py", 'if state["seed"] != dataset.shuffle_seed:', "if False:"),
        ("_sources/open.py", "if not 0 <= position <= len(self._batches):", "if False:"),
        ("_iterator.py", 'if state["version"] != _VERSION:', "if False:"),
        ("_iterator.py", 'if state["policy"] != self._plan.kind:', "if False:"),
    ],
    "test_sources.py::test_a_hugging_face_stream_is_resumed_in_its_epoch_and_whole_in_the_next": [
        ("_sources/open.py", "set_epoch(dataset.epoch if state is None else", "set_epoch(dataset.epoch if True else"),
    ],
    "test_position.py::test_the_position_that_a_dataset_holds_is_changed_while_nothing_is_read_ahead": [
        ("_sources/open.py", "dataset.load_state_dict(before)", "pass"),
    ],
    "test_position.py::test_a_dataset_that_holds_its_state_may_hold_that_of_the_last_pass": [
        ("_sources/open.py", "if not self._has_begun:", "if False:"),
    ],
    "test_prefetch.py::test_any_exception_reaches_the_loop": [
        ("_sources/open.py", "            iterator.close()", "            pass"),
        ("_prefetch.py", "failure = failure or error", "pass"),
    ],
    "test_position.py::test_resuming_with_another_number_of_replicas_gives_every_example_once": [
        ("_sources/open.py", "if isinstance(state, bytes) else state", "if False else state"),
    ],
    "test_plan.py::test_auto_says_what_it_chose_and_why": [
        ("_sources/grain.py", "len(files) >= num_workers else", "len(files) > num_workers else"),
        ("_sources/grain.py", "if name in _ACROSS_FILES:", "if False:"),
    ],
    "test_plan.py::test_each_worker_reads_its_own_files_and_no_other": [
        ("_sources/grain.py", "slice(worker, None, num_workers)", "slice(worker, None, num_workers + 1)"),
        ("_sources/grain.py", "copy.deepcopy(dataset)", "dataset"),
    ],
    "test_plan.py::test_workers_whose_batches_do_not_fit_are_told_so": [
        ("_sharing/agree.py", "if rows is not with_rows[first] and rows != with_rows[first]:", "if False:"),
        ("_sharing/agree.py", "return escape(text, _MAX_SHOWN)", "return text"),
    ],
    "test_plan.py::test_workers_that_read_different_batches_under_data_are_told_so": [
        ("_sharing/agree.py", "self._checksum = _checksum(batch, self._checksum)", "pass"),
    ],
    "test_plan.py::test_another_record_anywhere_in_any_array_of_a_batch_is_seen": [
        ("_sharing/agree.py", "reshape(-1).view(np.uint8), checksum)", "reshape(-1).view(np.uint8)[:100_000], checksum)"),
        ("_sharing/agree.py", "view(np.uint8), checksum)", "view(np.uint8))"),
    ],
    "test_dataset.py::test_every_row_of_an_uneven_batch_arrives": [
        ("_sharing/rows.py", "place[len(part) :] = 0", "place[len(part) :] = 1"),
        ("_iterator.py", "None if is_even else", "None if False else"),
    ],
    "test_dataset.py::test_the_rows_of_the_replicas_in_order_are_the_batch": [
        (
            "_sharing/rows.py",
            "[size + 1] * extra + [size] * (num_replicas - extra)",
            "[size] * (num_replicas - extra) + [size + 1] * extra",
        ),
    ],
    "test_dataset.py::test_dtypes_become_those_of_jax": [
        ("_sharing/rows.py", 'array.astype(array.dtype.newbyteorder("="), copy=False)', "array"),
    ],
    "test_dataset.py::test_a_source_may_use_one_buffer_for_all_batches": [
        ("_sharing/steps.py", "if source.is_owned and sizes", "if sizes"),
    ],
    "test_plan.py::test_by_file_a_pipeline_may_use_one_buffer_for_all_batches": [
        ("_sharing/steps.py", "arrays = copied(to_numpy(batch))", "arrays = to_numpy(batch)"),
    ],
    "test_sources.py::test_a_function_may_make_any_kind_of_dataset": [
        ("_sharing/steps.py", "[copied(to_numpy(e)) for e in", "[to_numpy(e) for e in"),
    ],
    "test_plan.py::test_by_file_dropping_the_remainder_ends_with_the_first_worker_that_runs_out": [
        ("_sharing/steps.py", "batch_size % layout.num_replicas if layout.drop_remainder else 0", "0"),
        ("_sharing/steps.py", "if agreed.num_ended:", "if False:"),
    ],
    "test_position.py::test_workers_go_on_where_each_of_them_was": [
        ("_sharing/steps.py", '{"rows": skip,', '{"rows": 0,'),
    ],
    "test_plan.py::test_by_file_a_users_own_transformation_is_the_users_word": [
        ("_sharing/plan.py", "is_certain=policy is AutoShardPolicy.AUTO", "is_certain=True"),
    ],
    "test_sources.py::test_each_replica_takes_the_next_element_and_none_is_dropped": [
        ("_dataset.py", "complete + (rest > 0 and", "complete + (False and"),
    ],
    "test_dataset.py::test_drop_remainder_leaves_out_the_last_rows_of_a_batch": [
        ("_dataset.py", "if not self._has_dropped:", "if True:"),
        ("_dataset.py", "at_least=self._mesh.num_replicas)", "at_least=1)"),
    ],
    "test_sources.py::test_a_filtered_map_dataset_does_not_know_its_length": [
        ("_dataset.py", "and not grain.has_length(dataset)", "and False"),
    ],
    "test_prefetch.py::test_ctrl_c_in_a_pipeline_that_nobody_reads_ahead_loses_none_or_says_so": [
        ("_iterator.py", "                self._begin_again()\n", "                pass\n"),
        ("_iterator.py", "or self._layout.worker.count > 1", "and False"),
    ],
    "test_prefetch.py::test_ctrl_c_while_waiting_for_a_batch_loses_none": [
        ("_iterator.py", "if not isinstance(error, KeyboardInterrupt):", "if True:"),
    ],
    "test_position.py::test_a_position_of_a_worker_is_for_that_worker": [
        ("_iterator.py", 'state["worker"] != [worker.index, worker.count]:', "False:"),
    ],
    "test_position.py::test_a_state_says_how_much_of_a_batch_was_taken": [
        ("_iterator.py", "            **self._extra,\n", ""),
    ],
    "test_prefetch.py::test_so_many_batches_are_made_ahead_and_never_more": [
        ("_prefetch.py", "len(self._ready) < self._count or", "len(self._ready) <= self._count or"),
    ],
    "test_prefetch.py::test_no_batch_is_kept_by_an_exception_or_a_closed_iterator": [
        ("_prefetch.py", "self._ready.clear()", "pass"),
    ],
    "test_prefetch.py::test_no_way_out_of_a_loop_leaves_a_thread_or_an_open_source": [
        ("_prefetch.py", "weakref.finalize(self, channel.close)", "pass"),
    ],
    "test_prefetch.py::test_the_pipeline_sees_the_callers_context": [
        ("_prefetch.py", "contextvars.copy_context()", "contextvars.Context()"),
    ],
    "test_prefetch.py::test_garbage_collected_in_the_thread_itself_ends_it": [
        ("_prefetch.py", "thread is None or thread is threading.current_thread()", "thread is None"),
    ],
    "test_prefetch.py::test_the_interpreter_exits_with_an_open_feed": [
        ("_prefetch.py", "atexit.register(self.close)", "pass"),
    ],
    "test_sources.py::test_the_input_context": [
        ("_input_context.py", "if rest:", "if False:"),
    ],
}
MUTANTS = [(f"data/{file}", old, new, f"tests/data/{test}") for test, damages in BY_TEST.items() for file, old, new in damages]
