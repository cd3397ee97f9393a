"""Damages to `_workers`, and the tests that catch them."""

_OF_COORDINATION = [
    (
        "                this.delete(self._key(self._round - 1))".strip(),
        "pass",
        "test_an_exchange_gives_the_values_of_all_in_worker_order_and_what_was_read_by_all_is_removed",
    ),
    ("entry[0] == thread and ", "", "test_the_last_keys_of_another_threads_channel_stay"),
    (" and entry[1] <= number", "", "test_what_others_may_still_read_of_a_closed_channel_stays"),
    ("this.clean_up(self._opened_by, self._number)", "pass", "test_closed_channels_leave_nothing_behind"),
    ("text[: MAX_TEXT + 1]", "text", "test_too_much_is_refused_on_all_workers_alike_and_not_sent"),
    ("if len(text) <= MAX_TEXT", "if len(text) < MAX_TEXT", "test_too_much_is_refused_on_all_workers_alike_and_not_sent"),
    ("any(other != name for other in names)", "False", "test_barriers_of_different_names_are_found"),
    ('"DEADLINE_EXCEEDED" in str(error)', "True", "test_an_error_of_the_service_is_not_taken_for_a_timeout"),
    ('"NOT_FOUND" in str(error)', "True", "test_an_error_of_the_service_is_not_taken_for_a_timeout"),
    ("threading.RLock()", "threading.Lock()", "test_garbage_collection_may_close_a_channel_while_keys_are_removed"),
    (
        "except (ValueError, RecursionError):",
        "except ValueError:",
        "test_what_is_no_value_of_another_worker_is_an_error_that_names_it",
    ),
]
_OF_VERDICT = [
    ("self.detail[-MAX_TEXT:]", "self.detail[:MAX_TEXT]", "test_what_is_too_long_is_cut_or_not_read"),
    ("text[: 16 * MAX_TEXT]", "text", "test_what_is_too_long_is_cut_or_not_read"),
    (" and trace.tb_frame.f_back is None", "", "test_an_error_that_was_caught_or_is_old_is_no_end"),
    ("is_native and any(", "any(", "test_the_code_of_an_exception_says_what_it_was"),
    ("0 < code < 256", "0 < code <= 256", "test_the_code_of_an_exception_says_what_it_was"),
    ("if isinstance(error, KeyboardInterrupt)", "if False", "test_the_code_of_an_exception_says_what_it_was"),
    ("except Exception:  # of the user's class", "except KeyError:", "test_the_code_of_an_exception_says_what_it_was"),
]
_OF_STALL = [
    ("if len(text) > _MAX_TEXT", "if False", "test_what_is_no_position_and_no_verdict_does_no_harm"),
    ("max(MIN_STALL_SECONDS, ", "min(MIN_STALL_SECONDS, ", "test_the_limit_is_twenty_steps_when_those_are_long"),
    ("before is None or position.beat != before.beat", "True", "test_a_worker_that_speaks_is_not_silent"),
    (" and not there.has_ended", "", "test_what_was_said_long_ago_may_be_over"),
    ("(not positions[one].has_ended, one)", "one", "test_both_sides_say_the_same"),
    (
        "here.started > there.started or (here",
        "here.started >= there.started or (here",
        "test_who_may_only_be_slow_is_waited_for",
    ),
    (
        "_ARRIVED_SECONDS if here.waits_in_phase else SETTLED_SECONDS",
        "_ARRIVED_SECONDS",
        "test_who_may_only_be_slow_is_waited_for",
    ),
    ("is_patient and worker not in quiet", "is_patient", "test_a_stopped_worker_is_late_wherever_it_was"),
    ("not there.waits or there.started < here.started", "not there.waits", "test_who_waits_in_vain_is_told_for_whom"),
    (
        "there.waits_in_program and there.started > here",
        "there.waits_in_program and there.started >= here",
        "test_who_may_only_be_slow_is_waited_for",
    ),
    ("there.detail != OTHERS_INPUT]", "False]", "test_whose_input_is_stuck_is_named"),
    ("self._state, self._still = state, 0.0", "self._state = state", "test_time_counts_while_nothing_changes"),
]
_OF_PROGRESS = [
    (
        "        self.witness = None\n        self.program",
        "        self.program",
        "test_it_waits_from_before_a_program_starts_until_its_result_is_there",
    ),
    (
        "tuple(phase for phase in self._progress.phases if phase is not self)",
        "self._progress.phases[:-1]",
        "test_phases_of_two_threads_do_not_end_each_other",
    ),
    ("zlib.crc32(digest, self.trail)", "zlib.crc32(digest)", "test_the_trail_is_of_what_was_done_in_its_order"),
    ("if in_main_thread():", "if True:", "test_batches_that_another_thread_takes_are_not_counted"),
    (
        "except RuntimeError:  # deleted",
        "except KeyError:  # deleted",
        "test_a_result_that_was_donated_and_a_program_known_to_have_finished_are_not_waited_for",
    ),
    ("UNKNOWN if self.is_threaded else ", "", "test_the_trail_is_not_known_after_another_thread_had_part_in_it"),
]
_OF_SAME_PROGRAM = [
    ("UNKNOWN not in batches and ", "", "test_histories_that_are_the_same_or_not_known_pass_and_others_are_told"),
    ("UNKNOWN not in trails and ", "", "test_histories_that_are_the_same_or_not_known_pass_and_others_are_told"),
    ("self._num_checked = number", "self._num_checked = 1", "test_new_programs_and_starts_are_counted"),
    ("if position >= len(text)", "if position > len(text)", "test_a_program_that_is_the_beginning_of_another_differs"),
    ("escape_lines(excerpt, _MAX_EXCERPT)", "excerpt", "test_what_another_process_writes_is_shown_escaped"),
    (
        "isinstance(other, list) and len(other) == len(entry)",
        "isinstance(other, list)",
        "test_what_another_process_writes_is_shown_escaped",
    ),
    (
        "max(0, column - _MAX_LINE // 2) if near == number else 0",
        "0",
        "test_only_what_differs_is_shown_of_long_programs_and_long_lines",
    ),
    ("max(map(_count, ", "min(map(_count, ", "test_a_program_that_is_the_beginning_of_another_differs"),
    ('_env.DEBUG.get() == "detail"', "bool(_env.DEBUG.get())", "test_the_debug_mode_is_an_environment_variable"),
]
_OF_JOINT_PROGRAMS = [
    ("            is_compiled = True", "            pass", "test_a_program_is_agreed_on_and_compiled_before_it_starts"),
    ("(array.shape, str(array.dtype))", "array.shape", "test_every_new_shape_and_dtype_of_an_array_is_another_program"),
    ("isinstance(array, jax.core.Tracer)", "False", "test_every_new_shape_and_dtype_of_an_array_is_another_program"),
    (", is_patient=True", "", "test_a_program_is_agreed_on_and_compiled_before_it_starts"),
    ("agreement.check_order(name, text)", "pass", "test_in_the_debug_mode_every_start_is_compared_before_it"),
]
_OF_NEIGHBOURS = [
    (" or began != self.began", "", "test_a_process_is_dead_when_it_has_ended_and_no_other_is_taken_for_it"),
    ('state in "ZX" or ', "", "test_a_process_is_dead_when_it_has_ended_and_no_other_is_taken_for_it"),
    (
        "except FileNotFoundError:\n            return True",
        "except FileNotFoundError:\n            return False",
        "test_a_process_is_dead_when_it_has_ended_and_no_other_is_taken_for_it",
    ),
    ("process.host == self._own.host", "True", "test_neighbours_are_the_other_workers_of_this_host"),
    ("texts.keys() - self._found.keys()", "texts.keys()", "test_neighbours_are_the_other_workers_of_this_host"),
    ("_state_of(1)  # else", "pass  # else", "test_where_processes_are_hidden_none_is_taken_for_dead"),
    ("type(number) is int and number > 0", "isinstance(number, int)", "test_what_is_no_process_is_none"),
]
_OF_GUARD = [
    ("is_ours = os.getpid() == self._process and ", "is_ours = ", "test_a_child_process_is_not_this_worker"),
    ("            if known is None:".strip(), "if True:", "test_the_first_verdict_counts"),
    ("if self._failing.wait(_GRACE_SECONDS)", "if False", "test_an_error_of_the_same_moment_is_shown_as_its_own"),
    ("self._failing.set()", "pass", "test_an_error_of_the_same_moment_is_shown_as_its_own"),
    (
        "self._leave(verdict, (self._has_ended and self._sys_exit_code) or RESTART",
        "self._leave(verdict, RESTART",
        "test_the_code_of_sys_exit_is_kept_when_others_still_need_this_worker_and_a_caught_one_is_no_end",
    ),
    (
        "self._leave(verdict, (self._has_ended and ",
        "self._leave(verdict, (",
        "test_the_code_of_sys_exit_is_kept_when_others_still_need_this_worker_and_a_caught_one_is_no_end",
    ),
    ("code & 0xFF if", "code if", "test_an_end_waits_for_the_others_and_says_how_it_came"),
    ("(was_late or not self._was_late)", "True", "test_after_a_pause_a_worker_looks_first_at_what_has_come"),
    ("min(now - last, 2 * ROUND_SECONDS)", "now - last", "test_a_process_that_was_stopped_has_not_waited_in_that_time"),
    (
        "before.get(worker, 0.0) < _SERVICE_SILENT_TICKS <= seconds",
        "_SERVICE_SILENT_TICKS <= seconds",
        "test_a_silent_worker_is_told_once_and_not_ended",
    ),
    ('if "CANCELLED" in str(second)', "if False", "test_after_jax_was_shut_down_the_guard_is_quiet"),
    ("if not tells_of_lost_service(error)", "if True", "test_a_service_that_is_gone_ends_this_worker_before_jax_does"),
    (
        "if dead and self._has_ended:",
        "if False:",
        "test_a_worker_of_this_host_that_dies_is_named_at_once_wherever_this_one_is",
    ),
    (
        "tuple(sorted(set(dead) - self._by_worker(_ENDED).keys()))",
        "()",
        "test_a_worker_of_this_host_that_dies_is_named_at_once_wherever_this_one_is",
    ),
    ("self._arm_last_resort(code)", "pass", "test_whatever_blocks_while_a_worker_leaves_does_not_keep_it"),
    ("self._say_where(0.0)  # at once", "pass  # at once", "test_an_end_is_told_before_the_others_are_waited_for"),
    (
        "elif 0 not in dead and self._coordination.peek(_CALL) is not None",
        "elif False",
        "test_a_worker_that_died_after_it_said_why_is_believed",
    ),
    ('is_interactive = hasattr(sys, "ps1")', "is_interactive = False", "test_an_error_at_a_prompt_ends_nothing"),
    (" and error is not self._last_error", "", "test_an_error_that_was_caught_or_is_old_is_no_end"),
    (
        "is not None:\n                    return Verdict.decode(known)",
        "is False:\n                    return Verdict.decode(known)",
        "test_a_loss_is_explained_by_who_is_gone_or_by_what_was_said",
    ),
    ("if not self._neighbours.dead():", "if True:", "test_a_loss_is_explained_by_who_is_gone_or_by_what_was_said"),
    ("sys.exit = self._hooks[1]", "pass", "test_an_error_at_a_prompt_ends_nothing"),
    (
        "            if self._ticks_in_service:\n",
        "            if not self._ticks_in_service:\n",
        "test_a_service_that_is_silent_is_told_once_and_ends_a_worker_that_waits_for_longer_than_the_limit",
    ),
    (
        " and self._progress.is_waiting():",
        ":",
        "test_a_service_that_is_silent_is_told_once_and_ends_a_worker_that_waits_for_longer_than_the_limit",
    ),
]
_OF_RUNTIME = [
    ("    if errors:\n", "    if False:\n", "test_what_jax_raises_when_it_connects_is_raised"),
    (
        '        jax.config.update("jax_enable_preemption_service", False)  # it would',
        "        #",
        "test_jax_is_told_where_to_listen_and_how_soon_a_silent_worker_is_dead",
    ),
    (
        "HEARTBEAT_SECONDS = 10\n",
        "HEARTBEAT_SECONDS = 100\n",
        "test_jax_is_told_where_to_listen_and_how_soon_a_silent_worker_is_dead",
    ),
    ("    atexit.register(guard.stop)", "    #", "test_the_guard_watches_from_the_start_to_the_end_of_the_program"),
    (
        "runtime.cluster is not None and runtime.cluster.digest() != cluster.digest()",
        "False",
        "test_a_process_is_part_of_one_cluster",
    ),
    ('"mpi" if is_mpi else "gloo"', '"gloo"', "test_the_implementation_is_told_to_jax_and_nccl"),
    (
        "            return own, f",
        "            return True, f",
        "test_who_waits_for_the_devices_of_others_is_told_from_who_starts_its_own",
    ),
    (
        "(cluster.worker_index, cluster.num_workers) != (worker, num_workers)",
        "cluster.num_workers != num_workers",
        "test_the_users_own_jax_distributed_and_cluster_must_agree",
    ),
    ("num_workers > 1 and distributed.swallows_sigterm()", "False", "test_the_users_own_jax_distributed_and_cluster_must_agree"),
    ("exit_code=BAD_CONFIGURATION", "exit_code=1", "test_a_backend_that_runs_already_is_an_error_that_says_what_to_move"),
    (
        "raise WorkerLostError(text) from error",
        "raise",
        "test_jax_s_own_limit_for_devices_names_the_worker_and_asks_for_a_new_start",
    ),
]
MUTANTS = [
    (f"_workers/{name}.py", old, new, f"tests/_workers/test_{test_file or name}.py::{test}")
    for name, test_file, damages in [
        ("coordination", "", _OF_COORDINATION),
        ("verdict", "guard", _OF_VERDICT),
        ("stall", "", _OF_STALL),
        ("progress", "", _OF_PROGRESS),
        ("same_program", "", _OF_SAME_PROGRAM),
        ("joint_programs", "", _OF_JOINT_PROGRAMS),
        ("neighbours", "", _OF_NEIGHBOURS),
        ("guard", "", _OF_GUARD),
        ("runtime", "", _OF_RUNTIME),
    ]
    for old, new, test in damages
]
