"""Damages to `_workers`, by the test that catches them."""

_WING = {
    "test_coordination.py::test_an_exchange_gives_the_values_of_all_in_worker_order_and_what_was_read_by_all_is_removed": [
        ("coordination", "if is_last and self._round:", "if False:"),
    ],
    "test_coordination.py::test_who_differs_is_told_without_waiting_for_all": [
        ("coordination", "(count == 1 and len(", "(False and len("),
    ],
    "test_coordination.py::test_an_exchange_that_was_interrupted_may_be_made_again": [
        ("coordination", "        if not self._counted:\n", "        if True:\n"),
    ],
    "test_stall.py::test_data_that_has_ended_while_another_worker_has_taken_more_is_certain": [
        ("stall", " and position.batch[2] > count", ""),
        ("stall", " and all(map(_is_place, [position.batch, *position.ends]))", ""),
    ],
    "test_same_program.py::test_batches_that_differ_are_told_with_what_helps": [
        ("same_program", "    if BATCH in parted:", "    if False:"),
    ],
    "test_coordination.py::test_the_last_keys_of_another_threads_channel_stay": [
        ("coordination", "entry[0] == thread and ", ""),
    ],
    "test_coordination.py::test_what_others_may_still_read_of_a_closed_channel_stays": [
        ("coordination", " and entry[1] <= number", ""),
    ],
    "test_coordination.py::test_too_much_is_refused_on_all_workers_alike_and_not_sent": [
        ("coordination", "text[: MAX_TEXT + 1]", "text"),
        ("coordination", "if len(text) <= MAX_TEXT", "if len(text) < MAX_TEXT"),
    ],
    "test_coordination.py::test_barriers_of_different_names_are_found": [
        ("coordination", "any(other != name for other in names)", "False"),
    ],
    "test_coordination.py::test_an_error_of_the_service_is_not_taken_for_a_timeout": [
        ("coordination", '"DEADLINE_EXCEEDED" in str(error)', "True"),
        ("coordination", '"NOT_FOUND" in str(error)', "True"),
    ],
    "test_coordination.py::test_garbage_collection_may_close_a_channel_while_keys_are_removed": [
        ("coordination", "threading.RLock()", "threading.Lock()"),
    ],
    "test_guard.py::test_what_is_too_long_is_cut_or_not_read": [
        ("verdict", "self.detail[-MAX_TEXT:]", "self.detail[:MAX_TEXT]"),
        ("verdict", "parse(text, 16 * MAX_TEXT)", "parse(text, 10**9)"),
    ],
    "test_guard.py::test_an_error_that_was_caught_or_is_old_is_no_end": [
        ("verdict", " and trace.tb_frame.f_back is None", ""),
        ("guard", " and error is not self._last_error", ""),
    ],
    "test_guard.py::test_the_code_of_an_exception_says_what_it_was": [
        ("verdict", "is_native and any(", "any("),
        ("verdict", "0 < code < 256", "0 < code <= 256"),
        ("verdict", "except Exception:  # of the user's class", "except KeyError:"),
    ],
    "test_stall.py::test_a_position_survives_the_way_and_nothing_else_is_one": [
        ("messages", "if len(text) <= max_text", "if True"),
    ],
    "test_stall.py::test_the_limit_is_twenty_steps_when_those_are_long": [
        ("stall", "max(MIN_STALL_SECONDS, ", "min(MIN_STALL_SECONDS, "),
    ],
    "test_stall.py::test_a_worker_that_speaks_is_not_silent": [
        ("stall", "before is None or position.beat != before.beat", "True"),
    ],
    "test_stall.py::test_what_was_said_long_ago_may_be_over": [
        ("stall", " and not there.has_ended", ""),
    ],
    "test_stall.py::test_both_sides_say_the_same": [
        ("stall", "(not positions[one].has_ended, one)", "one"),
    ],
    "test_stall.py::test_who_may_only_be_slow_is_waited_for": [
        ("stall", "here.started > there.started or (here", "here.started >= there.started or (here"),
        ("stall", "_ARRIVED_SECONDS if here.waits_in_phase else SETTLED_SECONDS", "_ARRIVED_SECONDS"),
        (
            "stall",
            "between and there.waits_in_program and there.started > here",
            "between and there.waits_in_program and there.started >= here",
        ),
    ],
    "test_stall.py::test_a_stopped_worker_is_late_wherever_it_was": [
        ("stall", "is_patient and worker not in quiet", "is_patient"),
    ],
    "test_stall.py::test_who_waits_in_vain_is_told_for_whom": [
        ("stall", "not there.waits or there.started < here.started", "not there.waits"),
    ],
    "test_stall.py::test_time_counts_while_nothing_changes": [
        ("stall", "self._state, self._still = state, 0.0", "self._state = state"),
    ],
    "test_progress.py::test_it_waits_from_before_a_program_starts_until_its_result_is_there": [
        ("progress", "        self.witness = None\n        self.program", "        self.program"),
    ],
    "test_progress.py::test_phases_of_two_threads_do_not_end_each_other": [
        ("progress", "tuple(phase for phase in self._progress.phases if phase is not self)", "self._progress.phases[:-1]"),
    ],
    "test_progress.py::test_the_trail_is_of_what_was_done_in_its_order": [
        ("progress", "zlib.crc32(digest, checksum)", "zlib.crc32(digest)"),
    ],
    "test_progress.py::test_batches_that_another_thread_takes_are_not_counted": [
        ("progress", "if in_main_thread():", "if True:"),
    ],
    "test_progress.py::test_a_result_that_was_donated_and_a_program_known_to_have_finished_are_not_waited_for": [
        ("progress", "except RuntimeError:  # deleted", "except KeyError:  # deleted"),
    ],
    "test_progress.py::test_the_trail_is_not_known_after_another_thread_had_part_in_it": [
        ("progress", " if self.trail.is_known else UNKNOWN", ""),
        ("progress", " and own_checksum != checksum and self.is_known", " and own_checksum != checksum"),
    ],
    "test_same_program.py::test_histories_that_are_the_same_or_not_known_pass_and_others_are_told": [
        ("same_program", "UNKNOWN not in batches and ", ""),
        ("same_program", "UNKNOWN not in done and ", ""),
    ],
    "test_same_program.py::test_new_programs_and_starts_are_counted": [
        ("same_program", "self._num_checked = number", "self._num_checked = 1"),
    ],
    "test_same_program.py::test_a_program_that_is_the_beginning_of_another_differs": [
        ("same_program", "if position >= len(text)", "if position > len(text)"),
    ],
    "test_same_program.py::test_what_another_process_writes_is_shown_escaped": [
        ("same_program", "escape_lines(excerpt, _MAX_EXCERPT)", "excerpt"),
        ("same_program", "isinstance(value, list) and len(value) == count", "isinstance(value, list)"),
    ],
    "test_same_program.py::test_only_what_differs_is_shown_of_long_programs_and_long_lines": [
        ("same_program", "max(0, column - _MAX_LINE // 2) if near == number else 0", "0"),
    ],
    "test_same_program.py::test_the_debug_mode_is_an_environment_variable": [
        ("same_program", '_env.DEBUG.get() == "detail"', "bool(_env.DEBUG.get())"),
    ],
    "test_joint_programs.py::test_a_program_is_agreed_on_and_compiled_before_it_starts": [
        ("joint_programs", "            is_compiled = True", "            pass"),
    ],
    "test_joint_programs.py::test_a_step_is_what_users_count": [
        ("joint_programs", "progress.updates += is_update", "progress.updates += is_run"),
        ("progress", "return self.updates or self.runs", "return self.runs"),
    ],
    "test_joint_programs.py::test_every_new_shape_and_dtype_of_an_array_is_another_program": [
        ("joint_programs", "{array.dtype}{list(array.shape)}", "{list(array.shape)}"),
        ("joint_programs", "isinstance(array, jax.core.Tracer)", "False"),
    ],
    "test_joint_programs.py::test_in_the_debug_mode_every_start_is_compared_before_it": [
        ("joint_programs", "agreement.check_order(name, text)", "pass"),
    ],
    "test_neighbours.py::test_a_process_is_dead_when_it_has_ended_and_no_other_is_taken_for_it": [
        ("neighbours", " or began != self.began", ""),
        ("neighbours", 'state in "ZX" or ', ""),
        (
            "neighbours",
            "except FileNotFoundError:\n            return True",
            "except FileNotFoundError:\n            return False",
        ),
    ],
    "test_neighbours.py::test_neighbours_are_the_other_workers_of_this_host": [
        ("neighbours", "process.host == self.own.host", "True"),
        ("neighbours", "texts.keys() - self._found.keys()", "texts.keys()"),
    ],
    "test_neighbours.py::test_where_processes_are_hidden_none_is_taken_for_dead": [
        ("neighbours", "_state_of(1)  # else", "pass  # else"),
    ],
    "test_guard.py::test_a_child_process_is_not_this_worker": [
        ("guard", "is_ours = os.getpid() == self._process and ", "is_ours = "),
    ],
    "test_guard.py::test_the_first_verdict_counts": [
        ("guard", "if known is None:", "if True:"),
    ],
    "test_guard.py::test_an_error_of_the_same_moment_is_shown_as_its_own": [
        ("guard", "if self._failing.wait(_GRACE_SECONDS)", "if False"),
        ("guard", "self._failing.set()", "pass"),
    ],
    "test_guard.py::test_the_code_of_sys_exit_is_kept_when_others_still_need_this_worker_and_a_caught_one_is_no_end": [
        ("guard", "code = (self._has_ended and self._sys_exit_code) or verdict", "code = verdict"),
        ("guard", "code = (self._has_ended and ", "code = ("),
    ],
    "test_guard.py::test_an_end_waits_for_the_others_and_says_how_it_came": [
        ("guard", "code & 0xFF if", "code if"),
    ],
    "test_guard.py::test_after_a_pause_a_worker_looks_first_at_what_has_come": [
        ("guard", "is_on_time = was_late or not self._was_late", "is_on_time = True"),
    ],
    "test_guard.py::test_a_process_that_was_stopped_has_not_waited_in_that_time": [
        ("guard", "min(now - last, 2 * self._round_seconds)", "now - last"),
    ],
    "test_guard.py::test_a_silent_worker_is_told_once_and_not_ended": [
        ("guard", "before.get(worker, 0.0) < _SERVICE_SILENT_TICKS <= seconds", "_SERVICE_SILENT_TICKS <= seconds"),
    ],
    "test_guard.py::test_after_jax_was_shut_down_the_guard_is_quiet": [
        ("guard", 'if "CANCELLED" in str(second)', "if False"),
    ],
    "test_guard.py::test_a_service_that_is_gone_ends_this_worker_before_jax_does": [
        ("guard", "if not tells_of_lost_service(error)", "if True"),
    ],
    "test_guard.py::test_a_worker_of_this_host_that_dies_is_named_at_once_wherever_this_one_is": [
        ("guard", "if dead and 0 not in dead and self._has_ended:", "if False:"),
        ("guard", "tuple(sorted(set(dead) - self._coordination.by_worker(_ENDED).keys()))", "()"),
    ],
    "test_guard.py::test_whatever_blocks_while_a_worker_leaves_does_not_keep_it": [
        ("shutdown", "self.arm_last_resort(code)", "pass"),
    ],
    "test_guard.py::test_an_end_is_told_before_the_others_are_waited_for": [
        ("guard", "self._say_where(0.0)  # at once", "pass  # at once"),
    ],
    "test_guard.py::test_a_worker_that_died_after_it_said_why_is_believed": [
        ("guard", "elif 0 not in dead and (call := self._coordination.peek(CALL)) is not None", "elif call := None"),
    ],
    "test_guard.py::test_an_error_at_a_prompt_ends_nothing": [
        ("guard", 'is_interactive = hasattr(sys, "ps1")', "is_interactive = False"),
        ("guard", "sys.exit = self._hooks[1]", "pass"),
    ],
    "test_guard.py::test_a_loss_is_explained_by_who_is_gone_or_by_what_was_said": [
        (
            "shutdown",
            "if known := self._known(0.0):",
            "if known := None:",
        ),
        ("shutdown", "if not self._neighbours.dead():", "if True:"),
    ],
    "test_guard.py::test_a_service_that_is_silent_is_told_once_and_ends_a_worker_that_waits_for_longer_than_the_limit": [
        ("guard", "            if self._ticks_in_service:\n", "            if not self._ticks_in_service:\n"),
        ("guard", " and self._progress.is_waiting():", ":"),
    ],
    "test_guard.py::test_programs_in_another_order_end_the_job_with_one_wherever_the_workers_are": [
        ("guard", "if any(self._progress.trail.contradicts(", "if all(self._progress.trail.contradicts("),
        ("guard", 'texts = {0: self._coordination.peek(f"{_POSITION}/0") or ""} if', "texts = {} if"),
    ],
    "test_guard.py::test_no_job_ends_well_whose_workers_have_done_different_things": [
        ("guard", "require_same_history(histories, self._shutdown.trails)", "pass"),
    ],
    "test_guard.py::test_sys_exit_in_another_thread_is_no_end": [
        ("guard", "        if in_main_thread():\n", "        if True:\n"),
    ],
    "test_guard.py::test_what_the_last_programs_find_wrong_is_an_error_of_the_end": [
        ("guard", "                self._progress.finish()\n", "                pass\n"),
        ("guard", "if all(UNKNOWN not in history for history in histories)", "if True"),
    ],
    "test_guard.py::test_a_worker_that_is_asked_tells_what_it_did_and_leaves_with_the_code_of_the_verdict": [
        ("shutdown", "if call == TELL:", "if False:"),
        ("verdict", 'FAILED if fields.get("code") == FAILED else RESTART', "RESTART"),
    ],
    "test_guard.py::test_a_collective_that_fails_because_different_programs_met_says_so": [
        ("shutdown", "if is_other_order(trails := self._told()):", "if False and (trails := []):"),
    ],
    "test_guard.py::test_a_death_is_noticed_between_two_rounds": [
        ("shutdown", " if 0 in dead else numbered(dead)", " if False else numbered(dead)"),
        ("neighbours", "return bool(ended)", "return False"),
    ],
    "test_guard.py::test_a_chief_that_does_not_speak_while_its_service_answers_is_named_to_all": [
        ("guard", "if worker and seconds >= _UNHEARD_SECONDS", "if seconds >= _UNHEARD_SECONDS"),
    ],
    "test_guard.py::test_worker_0_finds_who_waits_in_vain_for_another": [
        ("guard", "text = judge_all(self._own.limit,", "text = judge(0, self._own.limit,"),
    ],
    "test_guard.py::test_the_others_name_worker_0_and_leave_the_rest_to_it": [
        ("guard", ", sees_all=False)", ")"),
        ("guard", "{**everyone, **positions}", "positions"),
    ],
    "test_guard.py::test_who_asks_later_hears_what_the_first_has_found": [
        ("shutdown", "if not self._call() and (", "if self._call() and ("),
    ],
    "test_guard.py::test_only_who_has_done_something_else_tells_it": [
        ("shutdown", " or is_other_order(told):", " or True:"),
    ],
    "test_stall.py::test_of_all_that_wait_one_is_judged_for_each_place": [
        ("stall", "if position.still > positions[longest].still:", "if False:"),
        ("stall", "if is_heard and not", "if not"),
    ],
    "test_trail.py::test_what_was_long_ago_contradicts_nothing": [
        ("progress", "own_number == number and ", ""),
    ],
    "test_trail.py::test_it_is_told_since_when_workers_have_parted": [
        ("same_program", "[row for row in rows if _contradicts(row)] or ", ""),
        ("same_program", "if found is rows[0] and number > 1:", "if False:"),
    ],
    "test_links.py::test_the_two_ends_of_a_connection_without_an_answer_are_named": [
        ("links", "(one.remote, one.local) in ends", "(one.local, one.remote) in ends"),
    ],
    "test_links.py::test_what_arrives_again_or_is_only_slow_ends_nothing": [
        ("links", "if stuck or self._has_told:", "if stuck:"),
        ("links", "connections(STUCK_RETRIES)", "connections(1)"),
    ],
    "test_links.py::test_the_connections_of_this_process_are_those_that_the_kernel_lists": [
        ("links", "if inode in own:", "if True:"),
        ("links", 'if timer.startswith(f"{_SENDS_AGAIN}:") else 0', "if True else 0"),
    ],
    "test_runtime.py::test_what_jax_raises_when_it_connects_is_raised": [
        ("runtime", "    if errors:\n", "    if False:\n"),
    ],
    "test_runtime.py::test_jax_is_told_where_to_listen_and_how_soon_a_silent_worker_is_dead": [
        ("runtime", '        jax.config.update("jax_enable_preemption_service", False)  # it would', "        #"),
        ("runtime", "HEARTBEAT_SECONDS = 10\n", "HEARTBEAT_SECONDS = 100\n"),
    ],
    "test_runtime.py::test_the_guard_watches_from_the_start_to_the_end_of_the_program": [
        ("runtime", "    atexit.register(guard.stop)", "    #"),
    ],
    "test_runtime.py::test_a_process_that_a_worker_has_started_is_not_that_worker_too": [
        ("runtime", "name == _name_of(cluster) and process", "process"),
        ("runtime", "name == _name_of(cluster) and process != str(os.getpid())", "name == _name_of(cluster)"),
    ],
    "test_runtime.py::test_a_process_is_part_of_one_cluster": [
        ("runtime", "runtime.cluster is not None and runtime.cluster.digest() != cluster.digest()", "False"),
    ],
    "test_runtime.py::test_the_implementation_is_told_to_jax_and_nccl": [
        ("runtime", '"mpi" if is_mpi else "gloo"', '"gloo"'),
    ],
    "test_runtime.py::test_who_waits_for_the_devices_of_others_is_told_from_who_starts_its_own": [
        ("runtime", "            return own, f", "            return True, f"),
    ],
    "test_runtime.py::test_the_users_own_jax_distributed_and_cluster_must_agree": [
        ("runtime", "(cluster.worker_index, cluster.num_workers) != (worker, num_workers)", "cluster.num_workers != num_workers"),
        ("runtime", "num_workers > 1 and distributed.swallows_sigterm()", "False"),
    ],
    "test_runtime.py::test_a_backend_that_runs_already_is_an_error_that_says_what_to_move": [
        ("runtime", "exit_code=BAD_CONFIGURATION", "exit_code=1"),
    ],
    "test_runtime.py::test_jax_s_own_limit_for_devices_names_the_worker_and_asks_for_a_new_start": [
        ("runtime", "raise WorkerLostError(text) from error", "raise"),
    ],
}
MUTANTS = [
    (f"_workers/{file}.py", old, new, f"tests/_workers/{test}") for test, damages in _WING.items() for file, old, new in damages
]
