"""Damages to `_command`, and the tests that catch them."""

_OF_ENDING = [
    (" and number != signal.SIGINT", "", "test_exit_codes"),
    ("ending.seconds - first.seconds <= TOGETHER_SECONDS", "True", "test_the_culprit"),
    ("(ending for ending in causes if ending.code != RESTART)", "iter(())", "test_the_culprit"),
    ("code >= 0 else 128 - code", "code >= 0 else 128 + code", "test_exit_codes"),
    (
        "step > self.best.get(folder, known)",
        "step >= self.best.get(folder, known)",
        "test_a_new_checkpoint_renews_the_budget_and_each_folder_has_steps_of_its_own",
    ),
    ("max(self.best.values(), default=-1)", "-1", "test_a_new_checkpoint_renews_the_budget_and_each_folder_has_steps_of_its_own"),
    ("any(ending.code == BAD_CONFIGURATION for ending in attempt.endings)", "False", "test_what_is_never_restarted"),
    (
        "not new or attempt.culprit().code not in (PREEMPTED, -signal.SIGTERM)",
        "True",
        "test_preemption_with_a_new_checkpoint_is_free",
    ),
    ("ranges[-1][1] + 1", "ranges[-1][1] + 2", "test_summaries"),
]
_OF_GROUP = [
    (
        "max(FAREWELL_SECONDS, self._grace) if code == PREEMPTED else FAREWELL_SECONDS",
        "FAREWELL_SECONDS",
        "test_who_saves_after_a_preemption_is_not_disturbed",
    ),
    ("not worker.ended or _is_alive(worker.process.pid)", "not worker.ended", "test_what_a_worker_has_started_ends_with_it"),
    ("signal.SIGTERM if number == signal.SIGHUP else number", "number", "test_signals_are_passed_on_once"),
    ("len(text) < _PROGRESS_BYTES", "len(text) <= _PROGRESS_BYTES", "test_what_is_no_step_counts_as_none"),
    ("-????????", "-*", "test_each_writer_of_checkpoints_may_have_a_file_of_its_own"),
    (
        "start_new_session=True,  # the terminal's",
        "start_new_session=False,  # the terminal's",
        "test_signals_are_passed_on_once",
    ),
    (
        "worker.was_asked, worker.was_killed = True",
        "worker.was_asked, worker.was_killed = False",
        "test_who_hangs_while_others_gave_up_is_asked_then_killed_and_no_cause",
    ),
    ("shutil.rmtree(folder, ignore_errors=True)  # when", "#", "test_nothing_is_left_when_the_keeper_is_killed"),
    ("            os.rmdir(folder)\n", "", "test_a_worker_that_cannot_be_started_ends_those_that_were"),
]
_OF_KEEPER = [
    ("os.killpg(group, signal.SIGKILL)", "pass", "test_no_orphans_when_the_launcher_is_killed"),
    ("    shutil.rmtree(folder, ignore_errors=True)", "    pass", "test_no_orphans_when_the_launcher_is_killed"),
    ("    os.close(keeper)\n", "", "test_no_orphans_when_the_launcher_is_killed"),
]
_OF_SIGNALS = [
    ("if time.monotonic() < self._notice_ends", "if False", "test_sigterms_of_one_notice_are_one"),
    ("if signal.getsignal(number) is not signal.SIG_IGN", "if True", "test_nohup_holds"),
]
_OF_OUTPUT = [
    ("> PENDING_BYTES", "> 2 * PENDING_BYTES", "test_an_outlet_takes_what_fits_and_forgets_what_nobody_reads"),
    ('if end.start() > start or end[0] != b"\\r"', "if True", "test_output_is_cut_into_lines"),
    ("            self._pending.clear()", "            pass", "test_an_outlet_takes_what_fits_and_forgets_what_nobody_reads"),
    ("        if self._is_open:\n", "        if True:\n", "test_an_outlet_takes_what_fits_and_forgets_what_nobody_reads"),
    ("if self._num_since > _VERDICT_LINES", "if False", "test_what_is_no_verdict_of_the_library_hides_nothing"),
    ("[: TAIL_LINES - len(verdict)]", "[:TAIL_LINES]", "test_a_verdict_is_shown_whole_and_without_stacks"),
    ("os.O_EXCL, 0o600", "os.O_EXCL, 0o644", "test_a_log_file_is_new_and_private"),
    (" | os.O_EXCL", "", "test_a_log_file_is_new_and_private"),
    ("            attempt += 1", "            return folder", "test_log_folders_count_on_and_follow_no_links"),
    ("num_workers - 1}] ", "num_workers}] ", "test_prefixes_are_equally_wide"),
    (
        "os.isatty(fd) and not _env.NO_COLOR.get()",
        "os.isatty(fd)",
        "test_prefixes_are_coloured_on_a_terminal_unless_the_user_wants_none",
    ),
]
_OF_CHECK = [
    ("len(set(digests)) > 1", "len(set(digests)) > 2", "test_results_that_differ_by_worker_are_found"),
    ("rtol=tolerance", "rtol=0.01", "test_a_wrong_sum_is_found"),
    ("return 1 if self.problems else 0", "return 0", "test_a_wrong_sum_is_found"),
    (' SLOW" if s > SLOW * middle', ' SLOW" if s > 40 * middle', "test_a_slow_worker_is_marked"),
    ("escape(str(problem), _MAX_TEXT)", "problem", "test_what_other_workers_say_is_shown_escaped"),
    ("ClusterStartError, DeviceError, ValueError", "DeviceError, ValueError", "test_a_missing_worker_is_named"),
]
_OF_ENV = [
    ("if variable in _env.CLUSTER else", "if True else", "test_devices_versions_and_no_values_but_those_of_the_cluster"),
    ("escape(last, 400)", "last", "test_a_driver_that_hangs_or_crashes_is_a_line"),
    ("except subprocess.TimeoutExpired", "except KeyError", "test_a_driver_that_hangs_or_crashes_is_a_line"),
    ("escape(value, 300)", "value", "test_a_broken_cluster_is_reported_and_escaped"),
]
MUTANTS = [
    (f"_command/{name}.py", old, new, f"tests/_command/test_{in_file}.py::{test}")
    for name, in_file, damages in [
        ("ending", "ending", _OF_ENDING),
        ("group", "group", _OF_GROUP),
        ("keeper", "group", _OF_KEEPER),
        ("signals", "group", _OF_SIGNALS),
        ("output", "output", _OF_OUTPUT),
        ("check", "check", _OF_CHECK),
        ("env", "env", _OF_ENV),
    ]
    for old, new, test in damages
]
