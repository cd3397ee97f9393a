"""Damages to `_command`, by the test that catches them."""

_FOLDER = 'tempfile.TemporaryDirectory(prefix="mirrored-", ignore_cleanup_errors=True)'
_WING = {
    "test_group.py::test_a_stopped_worker_is_not_waited_for_until_it_is_killed": [
        ("group", "worker.process.send_signal(signal.SIGCONT)", "pass"),
        ("group", "farewell = 0.0  #", "pass  #"),
    ],
    "test_group.py::test_a_folder_of_logs_that_is_gone_or_cannot_be_made_does_not_end_the_restarts": [
        ("output", "    root.mkdir(mode=0o700, parents=True, exist_ok=True)", "    pass"),
    ],
    "test_ending.py::test_exit_codes": [
        ("ending", " and number != signal.SIGINT", ""),
        ("ending", "code >= 0 else 128 - code", "code >= 0 else 128 + code"),
    ],
    "test_ending.py::test_the_culprit": [
        ("ending", "ending.seconds - first.seconds <= TOGETHER_SECONDS", "True"),
        ("ending", "(ending for ending in causes if ending.code != RESTART)", "iter(())"),
    ],
    "test_ending.py::test_a_new_checkpoint_renews_the_budget_and_each_folder_has_steps_of_its_own": [
        ("ending", "step > self.best.get(folder, known)", "step >= self.best.get(folder, known)"),
        ("ending", "max(self.best.values(), default=-1)", "-1"),
    ],
    "test_ending.py::test_what_is_never_restarted": [
        ("ending", "any(ending.code == BAD_CONFIGURATION for ending in attempt.endings)", "False"),
    ],
    "test_ending.py::test_preemption_with_a_new_checkpoint_is_free": [
        ("ending", "not new or attempt.culprit().code not in (PREEMPTED, -signal.SIGTERM)", "True"),
    ],
    "test_group.py::test_who_saves_after_a_preemption_is_not_disturbed": [
        ("group", "max(FAREWELL_SECONDS, self.grace) if code == PREEMPTED else FAREWELL_SECONDS", "FAREWELL_SECONDS"),
    ],
    "test_group.py::test_what_a_worker_has_started_ends_with_it": [
        ("group", "not worker.ended or _is_alive(worker.process.pid)", "not worker.ended"),
    ],
    "test_group.py::test_signals_are_passed_on_once": [
        ("group", "signal.SIGTERM if number == signal.SIGHUP else number", "number"),
        ("standby", "start_new_session=True", "start_new_session=False"),
    ],
    "test_group.py::test_what_is_no_step_counts_as_none": [
        ("group", "len(text) < _PROGRESS_BYTES", "len(text) <= _PROGRESS_BYTES"),
    ],
    "test_group.py::test_each_writer_of_checkpoints_may_have_a_file_of_its_own": [
        ("group", "-????????", "-*"),
    ],
    "test_group.py::test_who_hangs_while_others_gave_up_is_asked_then_killed_and_no_cause": [
        ("group", "worker.was_asked = True", "worker.was_asked = False"),
    ],
    "test_group.py::test_nothing_is_left_when_the_keeper_is_killed": [
        ("group", _FOLDER, 'contextlib.nullcontext(tempfile.mkdtemp(prefix="mirrored-"))'),
    ],
    "test_group.py::test_a_worker_that_cannot_be_started_ends_those_that_were": [
        ("group", _FOLDER, 'contextlib.nullcontext(tempfile.mkdtemp(prefix="mirrored-"))'),
    ],
    "test_group.py::test_no_orphans_when_the_launcher_is_killed": [
        ("keeper", "os.killpg(group, signal.SIGKILL)", "pass"),
        ("keeper", "    shutil.rmtree(folder, ignore_errors=True)", "    pass"),
        ("keeper", "    os.close(keeper)\n", ""),
    ],
    "test_group.py::test_sigterms_of_one_notice_are_one": [
        ("signals", "if time.monotonic() < self._notice_ends", "if False"),
    ],
    "test_group.py::test_nohup_holds": [
        ("signals", "if signal.getsignal(number) is not signal.SIG_IGN", "if True"),
    ],
    "test_output.py::test_an_outlet_takes_what_fits_and_forgets_what_nobody_reads": [
        ("output", "> PENDING_BYTES", "> 2 * PENDING_BYTES"),
        ("output", "            self._pending.clear()", "            pass"),
        ("output", "        if self._is_open:\n", "        if True:\n"),
    ],
    "test_output.py::test_output_is_cut_into_lines": [
        ("output", 'if line or end[0] != b"\\r"', "if True"),
    ],
    "test_output.py::test_what_a_carriage_return_ends_is_a_state_that_is_as_wide_as_the_terminal_and_gives_way_to_a_line": [
        ("output", "[: max((width or 80) - len(start) - 1, 0)]", ""),
        ("output", "_ERASE_LINE + data if self._shows_state else data", "data"),
        ("output", "        if self._shows_state:\n", "        if True:\n"),
    ],
    "test_group.py::test_a_progress_bar_moves_in_one_line_of_a_terminal_and_is_a_line_now_and_then_elsewhere": [
        ("group", "stream.shown_at + STATE_SECONDS", "stream.shown_at"),
        ("group", "if worker is self._workers[0]:", "if True:"),
    ],
    "test_output.py::test_what_is_no_verdict_of_the_library_hides_nothing": [
        ("output", "maxlen=_VERDICT_LINES + 1", "maxlen=999"),
    ],
    "test_output.py::test_a_log_file_is_new_and_private": [
        ("output", "flags, 0o600", "flags, 0o644"),
        ("output", 'path, "x"', 'path, "w"'),
    ],
    "test_output.py::test_prefixes_are_equally_wide": [
        ("output", "num_workers - 1}] ", "num_workers}] "),
    ],
    "test_output.py::test_prefixes_are_coloured_on_a_terminal_unless_the_user_wants_none": [
        ("output", "self.is_terminal and not _env.NO_COLOR.get()", "self.is_terminal"),
    ],
    "test_check.py::test_results_that_differ_by_worker_are_found": [
        ("check", "len(set(digests)) > 1", "len(set(digests)) > 2"),
    ],
    "test_check.py::test_a_wrong_sum_is_found": [
        ("check", "rtol=tolerance", "rtol=0.01"),
        ("check", "return 1 if problems else 0", "return 0"),
    ],
    "test_check.py::test_a_slow_worker_is_marked": [
        ("check", ' SLOW" if s > SLOW * middle', ' SLOW" if s > 40 * middle'),
    ],
    "test_check.py::test_what_other_workers_say_is_shown_escaped": [
        ("check", "escape(str(problem), _MAX_TEXT)", "problem"),
    ],
    "test_check.py::test_a_missing_worker_is_named": [
        ("check", "ClusterStartError, DeviceError, ValueError", "DeviceError, ValueError"),
    ],
    "test_env.py::test_devices_versions_and_no_values_but_those_of_the_cluster": [
        ("env", "if variable in _env.CLUSTER else", "if True else"),
        ("env", " if version != NO_VERSION)", ")"),
    ],
    "test_env.py::test_a_driver_that_hangs_or_crashes_is_a_line": [
        ("env", "escape(last, 400)", "last"),
        ("env", "except subprocess.TimeoutExpired", "except KeyError"),
    ],
}
MUTANTS = [
    (f"_command/{file}.py", old, new, f"tests/_command/{test}") for test, damages in _WING.items() for file, old, new in damages
]
