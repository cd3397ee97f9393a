"""Damages to checkpoints: what is saved, what counts as a step, what is restored, and how a program leaves."""

#: By the test that catches them: the file in `_checkpoint`, a text in it, and what takes its place.
BY_TEST = {
    "test_checkpoint.py::test_a_directory_that_vanishes_is_made_again_and_said": [
        ("sole_writer.py", "if held is not None and not root.exists():", "if False:"),
    ],
    "test_checkpoint.py::test_steps_that_orbax_wrote_are_restored_and_the_next_one_needs_it_no_more": [
        ("format_1.py", "yield key, np.zeros(0, np.uint8)", "pass"),
        ("files.py", '.view(np.dtype(described[key]["dtype"]))', ""),
    ],
    "test_checkpoint.py::test_a_save_that_begins_after_the_main_thread_has_ended_is_made": [
        ("writer.py", "if not threading.main_thread().is_alive():", "if False:"),
    ],
    "test_checkpoint.py::test_ctrl_c_while_the_program_waits_for_its_last_save_is_shown_and_so_is_the_loss": [
        ("writer.py", "sys.excepthook(type(error), error, error.__traceback__)", "pass"),
    ],
    "test_checkpoint.py::test_a_step_that_another_object_is_writing_is_neither_replaced_nor_passed_over": [
        ("writer.py", "            writer.finish_in(self._files.root)\n", "            self.finish_in(self._files.root)\n"),
    ],
    "test_preemption.py::test_handlers_that_are_closed_in_any_order_leave_the_signal_as_it_was": [
        ("preemption.py", "if other._previous.get(number) == self._on_signal:", "if False:"),
    ],
    "test_nnx_objects.py::test_training_goes_on_where_it_was_saved": [
        ("state.py", "    if is_nnx_object(tree):", "    if False:"),
    ],
    "test_export.py::test_optimizers_sync_on_read_variables_keys_and_everything_else": [
        ("export.py", "if uneven_shapes(value) is not None:", "if False:"),
    ],
    "test_checkpoint.py::test_an_optimizers_count_comes_back_and_files_from_before_it_are_restored": [
        ("state.py", "if path.endswith(ITERATIONS) and not", "if path in saved.leaves and not"),
        ("state.py", "leaf.assign(0)", "pass"),
    ],
    "test_checkpoint.py::test_the_same_step_is_saved_once_and_an_older_one_is_refused": [
        ("checkpoint.py", "step < latest or (step == latest and step != self._last)", "step < latest"),
    ],
    "test_checkpoint.py::test_copies_that_differ_are_never_saved": [
        ("checkpoint.py", "if not spec_of(variable).is_on_read:", "if spec_of(variable).is_on_read:"),
    ],
    "test_checkpoint.py::test_a_last_save_that_failed_is_an_error_at_the_end": [
        ("checkpoint.py", "require_success(max_failed_saves=1)", "require_success()"),
    ],
    "test_checkpoint.py::test_damaged_steps_make_room_for_new_ones": [
        ("checkpoint.py", "go_on_from(step, set(damaged))", "go_on_from(step, set())"),
        ("files.py", "if step in self.look()[0]:", "if False:"),
        ("writer.py", "step, []\n        self.damaged.discard(step)", "step, []"),
    ],
    "test_checkpoint.py::test_what_does_not_fit_another_worker_is_restored_on_none": [
        ("checkpoint.py", "state.undo_positions(moved)", "pass"),
        ("checkpoint.py", 'self._require_same(reports, "id"', 'self._require_same(reports, "error"'),
    ],
    "test_checkpoint.py::test_names_and_arguments_are_checked": [
        ("arguments.py", "_NAME.fullmatch(name)", "_NAME.match(name)"),
        ("arguments.py", "0 <= number <= _MAX_STEP", "0 <= number"),
    ],
    "test_checkpoint.py::test_inside_a_step_it_is_refused": [
        ("checkpoint.py", "if frames.is_traced():", "if False:"),
    ],
    "test_checkpoint.py::test_a_partial_restore_leaves_out_what_is_not_named_and_nothing_else": [
        (
            "checkpoint.py",
            "for path, entry in saved.leaves.items() if path in leaves}",
            "for path, entry in saved.leaves.items()}",
        ),
    ],
    "test_checkpoint.py::test_wrong_arrays_in_whole_files_are_found": [
        (
            "checksums.py",
            "zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, zlib.crc32(head))",
            "zlib.crc32(head)",
        ),
    ],
    "test_checkpoint.py::test_flipped_bits_are_found_and_the_step_before_is_used": [
        ("checksums.py", "elif found != checksum:", "elif False:"),
    ],
    "test_checkpoint.py::test_what_nfs_leaves_of_a_removed_file_that_was_open_is_no_damage": [
        ("checksums.py", 'if not entry.name.startswith(".nfs"):', "if True:"),
    ],
    "test_checkpoint.py::test_other_damage_is_found": [
        ("checksums.py", "path.lstat().st_mode", "path.stat().st_mode"),
    ],
    "test_checkpoint.py::test_nothing_is_opened_that_is_not_a_file_as_it_was_written": [
        ("files.py", "if not is_readable:", "if False:"),
    ],
    "test_checkpoint.py::test_a_file_that_grows_or_changes_its_kind_while_it_is_looked_at_is_read_no_further": [
        ("checksums.py", "while size <= status.st_size and", "while"),
        ("checksums.py", "if recorded_size not in (None, status.st_size):", "if False:"),
    ],
    "test_checkpoint.py::test_a_record_that_is_no_record_is_damage": [
        ("checksums.py", "computed != recorded or not", "not"),
        ("checksums.py", "flags | os.O_NOFOLLOW", "flags"),
        ("files.py", "errno.ELOOP, ", ""),
    ],
    "test_checkpoint.py::test_a_step_survives_a_power_failure_before_it_counts": [
        ("files.py", "_sync(self.root)", "pass"),
        ("files.py", "os.fsync(file.fileno())", "pass"),
    ],
    "test_checkpoint.py::test_a_renamed_step_is_not_taken_for_another": [
        ("files.py", 'if record.get("step") != step:', "if False:"),
    ],
    "test_checkpoint.py::test_a_checkpoint_of_a_later_format_is_not_taken_for_damage": [
        ("files.py", 'record["format"] > FORMAT', 'record["format"] > FORMAT + 1'),
    ],
    "test_checkpoint.py::test_failed_saves_are_logged_and_too_many_end_training": [
        ("files.py", "shutil.rmtree(new, ignore_errors=True)", "pass"),
        ("writer.py", "len(self.failures) < (max", "len(self.failures) <= (max"),
        ("writer.py", "failures, self.failures = self.failures, []", "failures = self.failures"),
    ],
    "test_checkpoint.py::test_two_checkpoints_in_one_directory_do_not_disturb_each_other": [
        ("files.py", " and entry.path not in _being_written", ""),
    ],
    "test_checkpoint.py::test_what_is_not_a_step_of_ours_is_left_alone": [
        ("files.py", "if {RECORD, _ARRAYS, format_1.ARRAYS} & set(names)", "if names"),
    ],
    "test_checkpoint.py::test_a_mark_is_seen_where_it_is": [
        ("files.py", "time.time() - _STALE_SECONDS", "time.time()"),
    ],
    "test_checkpoint.py::test_a_program_that_changes_its_directory_saves_where_it_began": [
        ("files.py", "Path(os.path.realpath(directory))", "Path(directory)"),
    ],
    "test_checkpoint.py::test_a_damaged_step_is_damaged_also_where_not_all_of_it_can_be_read": [
        ("files.py", "{} if problems else unread.items()", "unread.items()"),
    ],
    "test_checkpoint.py::test_what_could_not_be_read_is_no_damage": [
        ("files.py", "error.errno not in _NO_FILE", "False"),
    ],
    "test_checkpoint.py::test_a_save_does_not_see_what_later_steps_do": [
        ("state.py", 'np.array(leaf, dtype=leaf.dtype.newbyteorder("="))', "np.asarray(leaf)"),
    ],
    "test_checkpoint.py::test_restored_values_take_their_place_in_nests": [
        ("state.py", "if not isinstance(tree, dict | list):", "if True:"),
    ],
    "test_checkpoint.py::test_all_differences_are_listed_before_anything_changes": [
        ("state.py", " or _contents(leaf) != _saved_contents(saved, entry):", ":"),
    ],
    "test_checkpoint.py::test_what_cannot_be_saved_is_refused_at_once": [
        ("leaves.py", "if not is_replaceable and", "if False and"),
    ],
    "test_checkpoint.py::test_each_worker_gets_back_its_own_position": [
        ("state.py", "by_worker[worker if len(by_worker) == num_workers else 0]", "by_worker[0]"),
    ],
    "test_checkpoint.py::test_an_iterator_that_refuses_its_position_leaves_all_as_it_was": [
        ("state.py", "                undo_positions(moved)", "                pass"),
    ],
    "test_checkpoint.py::test_sync_on_read_with_other_replicas_keeps_its_value": [
        ("state.py", ".shape[0] == spec_of(leaf).mesh.num_replicas\n    )", ".shape[0] > 0\n    )"),
    ],
    "test_checkpoint.py::test_retention_keeps_the_newest": [
        ("writer.py", "steps[: -self._max_to_keep]", "steps[: -self._max_to_keep - 1]"),
    ],
    "test_checkpoint.py::test_a_forked_child_ends_whatever_the_other_threads_held": [
        ("writer.py", " and self._thread.is_alive()", ""),
    ],
    "test_checkpoint.py::test_a_program_that_ends_without_waiting_loses_nothing": [
        ("writer.py", "atexit.register(_finish_all)", "pass"),
    ],
    "test_checkpoint.py::test_the_launcher_of_another_worker_is_told_too": [
        ("writer.py", "latest is not None and latest != self.latest", "latest is not None"),
        ("writer.py", "temporary.replace(target)", "Path(target).write_text(str(step))"),
    ],
    "test_checkpoint.py::test_workers_that_differ_are_told_how": [
        ("same_on_workers.py", "len(set(calls)) > 1", "len(set(calls)) > 2"),
        ("same_on_workers.py", "kinds != every[0]:", "False:"),
    ],
    "test_checkpoint.py::test_what_other_workers_say_is_escaped_and_cut": [
        ("same_on_workers.py", "return escape_titled(title, rest, _MAX_TEXT)", "return str(text)"),
    ],
    "test_sole_writer.py::test_a_second_program_is_told_so_changes_nothing_and_may_read": [
        ("checkpoint.py", "self._files.claim()", "pass"),
    ],
    "test_sole_writer.py::test_a_lock_whose_file_was_removed_is_taken_anew": [
        ("sole_writer.py", "if held is not None and held.stands():", "if held is not None:"),
        ("sole_writer.py", "    if _is_at(path, descriptor):\n        with", "    if True:\n        with"),
    ],
    "test_sole_writer.py::test_a_lock_that_its_holder_removes_while_we_open_it_is_none": [
        ("sole_writer.py", "is_mine = _is_at(path, descriptor)", "is_mine = True"),
    ],
    "test_sole_writer.py::test_a_killed_program_is_in_nobodys_way_also_when_a_forked_child_lives_on": [
        ("sole_writer.py", "            os.close(held.descriptor)", "            pass"),
    ],
    "test_sole_writer.py::test_where_there_are_no_locks_it_saves_and_says_so": [
        ("files.py", "is_dead = self._right is not None or", "is_dead = True or"),
    ],
    "test_sole_writer.py::test_a_right_is_kept_while_a_save_is_being_written": [
        ("checkpoint.py", "if not self._writer.is_writing():\n            self._files.release()", "self._files.release()"),
    ],
    "test_preemption.py::test_a_save_that_fails_is_no_orderly_end": [
        ("preemption.py", "if latest != step:", "if False:"),
    ],
    "test_preemption.py::test_the_agreed_step_is_the_one_that_is_saved": [
        ("preemption.py", "step >= self._watch.target()", "step > self._watch.target()"),
    ],
    "test_preemption.py::test_all_workers_leave_at_one_step_that_none_has_passed": [
        ("preemption.py", "max((step + 1 for", "max((step for"),
    ],
    "test_preemption.py::test_ctrl_c_after_a_signal_ends_at_once": [
        ("preemption.py", "signal.signal(signal.SIGINT, signal.SIG_DFL)", "pass"),
    ],
    "test_preemption.py::test_a_signal_while_all_agree_that_there_is_none_has_its_own_effect": [
        ("preemption.py", "if self._is_signalled:  # after", "if False:  # after"),
    ],
    "test_preemption.py::test_arguments_are_checked": [
        ("preemption.py", "if number == signal.SIGTERM or self._is_signalled:", "if True:"),
    ],
    "test_preemption.py::test_the_notice_of_one_handler_does_not_end_in_the_next": [
        ("preemption.py", "if signal.getsignal(signal.SIGTERM) == self._on_signal:", "if True:"),
    ],
    "test_preemption.py::test_a_signal_saves_the_step_and_leaves": [
        ("preemption.py", "works.append(self._say_signal)", "pass"),
    ],
    "test_preemption.py::test_a_program_leaves_only_when_the_notice_is_over": [
        ("preemption.py", "while (left := self._quiet_until - time.monotonic()) > 0:", "while False:"),
    ],
    "test_preemption.py::test_what_one_handler_said_is_not_heard_by_the_next": [
        ("preemption.py", "{next(_numbers)}", "0"),
    ],
    "test_preemption.py::test_sigterm_has_its_own_effect_in_every_forked_child": [
        ("preemption.py", "os.register_at_fork(after_in_child=_forget)", "pass"),
    ],
}
MUTANTS = [
    (f"_checkpoint/{file}", old, new, f"tests/_checkpoint/{test}")
    for test, damages in BY_TEST.items()
    for file, old, new in damages
]
