"""Damages to `_cluster` and to the single files on the ground, and the tests that catch them."""

_MEETING, _RESOLVERS = "tests/_cluster/test_meeting.py::", "tests/_cluster/test_resolvers.py::"
_GROUP, _RUNTIME = "tests/_command/test_group.py::", "tests/_workers/test_runtime.py::"
_SPEC = [
    ('len(spec.job("chief")) > 1', 'len(spec.job("chief")) > 2', "test_a_cluster_that_contradicts_itself_says_where"),
    ("0 <= self.task_id < count", "0 <= self.task_id <= count", "test_an_index_is_a_whole_number_of_a_task_that_exists"),
    (
        'self.spec.job("chief") + self.spec.job("worker")',
        'self.spec.job("worker") + self.spec.job("chief")',
        "test_chief_workers_and_evaluator_know_their_places",
    ),
    ("loopback if self.is_local else host", "host", "test_each_launcher_is_understood"),
    (
        " if None not in self.workers else tuple(a and str(split_address(a)[1]) for a in self.workers)",
        "",
        "test_the_digest_tells_clusters_apart_and_is_the_same_on_all_workers",
    ),
    (
        '[len(self.spec.job("chief")), known]',
        "[0, known]",
        "test_the_digest_tells_clusters_apart_and_is_the_same_on_all_workers",
    ),
    ("not ip.is_unspecified and ", "", "test_addresses_that_are_wrong_are_refused"),
    ('int(match["port"]) > 65535', 'int(match["port"]) > 65536', "test_addresses_that_are_wrong_are_refused"),
    ("host.lower(), port", "host, port", "test_a_cluster_that_contradicts_itself_says_where"),
]
_ENVIRONMENTS = [
    ("port + 1 if port < 65535 else port - 1", "port + 1", "test_each_launcher_is_understood"),
    (
        "len(result := dict(pairs)) != len(pairs)",
        "len(result := dict(pairs)) > len(pairs)",
        "test_a_malformed_tf_config_says_what_is_wrong_and_shows_a_right_one",
    ),
    (
        "except (ValueError, RecursionError) as error:",
        "except ValueError as error:",
        "test_a_malformed_tf_config_says_what_is_wrong_and_shows_a_right_one",
    ),
    (" or sum(counts) != num_workers", "", "test_slurm_variables_that_do_not_fit_are_refused"),
    ("if node != expected", "if node > expected", "test_slurm_variables_that_do_not_fit_are_refused"),
    (
        "has(environment, _env.MPI_LOCALNRANKS) or not _has_slurm(environment)",
        "True",
        "test_mpirun_in_a_slurm_allocation_is_not_taken_for_slurm",
    ),
    (" and int(text) == 0:", " and False:", "test_slurm_variables_that_do_not_fit_are_refused"),
    ('f"{number:0{len(first)}}"', 'f"{number}"', "test_lists_of_slurm_hosts_are_expanded_in_their_order"),
    ('job.encode(errors="replace")', 'b""', "test_jobs_on_one_host_get_different_ports"),
    (" and not launched)", ")", "test_each_launcher_is_understood"),
]
_OF_RESOLVERS = [
    ("_late(environment, there[0][1](environment))", "there[0][1](environment)", "test_each_launcher_is_understood"),
    ("if number != str(index)", "if not number", "test_an_indexed_job_needs_the_number_of_its_pods"),
    (
        "dataclasses.replace(read(environment), names_come_late=True)",
        "read(environment)",
        "test_in_kubernetes_names_may_come_late_whoever_describes_the_cluster",
    ),
    ("cluster.task_id if cluster.spec else None", "cluster.task_id", "test_resolvers_answer_as_in_tensorflow"),
]
_OF_MEETING = [
    (
        "host if own is None or _is_loopback(own) else own",
        "own or host",
        "test_workers_that_are_alike_come_together_and_leave_the_port_free",
    ),
    ("if sock.getsockname() == sock.getpeername()", "if False", "test_a_worker_does_not_take_its_own_connection_for_the_chief"),
    ("isinstance(answer, bytes) and not is_grpc(answer)", "False", "test_a_port_of_another_program_is_an_error_at_once"),
    ("not cluster.names_come_late or clock.left", "clock.left", "test_only_in_kubernetes_a_name_may_appear_late"),
    ("    keep_alive(sock)\n", "", "test_a_connection_to_a_host_that_vanished_does_not_stay"),
    (
        "if len(buffer) > MAX_LINE or not may_be_ours(buffer)",
        "if not may_be_ours(buffer)",
        "test_a_program_that_is_not_the_chief_is_an_error_at_once",
    ),
    (
        "min(PATIENCE_SECONDS, max(0.1, clock.left)) - 0.1",
        "clock.left",
        "test_a_name_server_that_does_not_answer_holds_nobody_up",
    ),
    (
        "min(clock.next_report, first_report), math.inf",
        "first_report, first_report",
        "test_a_chief_that_waits_for_its_port_says_so_less_and_less_often",
    ),
    (
        "            clock.has_met_a_run = True\n            return",
        "            return",
        "test_a_worker_that_waited_for_another_job_does_not_disturb_it",
    ),
]
_GATHERING = [
    ("not peer.hello and time.monotonic() >= peer.until", "False", "test_a_stranger_that_writes_slowly_is_cut_off"),
    ("len(strangers) > MAX_STRANGERS", "False", "test_of_too_many_strangers_the_oldest_goes"),
    (" or len(peer.buffer) > MAX_LINE", "", "test_a_stranger_that_says_too_much_is_cut_off_at_once"),
    ("self._drop(before)", "pass", "test_a_worker_that_connects_twice_is_one_worker"),
    (" and not before.is_gone()", "", "test_a_worker_that_left_unseen_may_come_again"),
    ("before.hello.token != hello.token and ", "", "test_a_worker_that_connects_twice_is_one_worker"),
    ("reset_on_close(peer.sock)", "pass", "test_strangers_neither_stop_the_chief_nor_keep_its_port"),
    ("(hello.index == 0 or hello.is_late", "(hello.is_late", "test_another_cluster_on_the_port_does_not_disturb_the_first"),
    ("hello.is_late or self", "self", "test_a_worker_that_waited_for_another_job_does_not_disturb_it"),
    ("missing[:8]", "missing[:9]", "test_many_missing_workers_are_named_in_a_short_line"),
    ("if self.cluster.is_local or not all", "if all", "test_a_chief_that_only_its_own_host_can_reach_says_so"),
    (
        "            if peer.hello:\n                self._tell(peer)\n",
        "            pass\n",
        "test_a_missing_worker_is_named_everywhere",
    ),
    (
        "2 * (time.monotonic() - self.started)",
        "time.monotonic() - self.started",
        "test_a_chief_that_waits_for_its_port_says_so_less_and_less_often",
    ),
]
_HELLO = [
    ("type(number) is int and ", "isinstance(number, int) and ", "test_what_is_no_hello_is_not_read"),
    ('if not isinstance(message["is_late"], bool)', "if False", "test_what_is_no_hello_is_not_read"),
    ("len(line) > MAX_LINE", "len(line) >= MAX_LINE", "test_what_is_no_hello_is_not_read"),
    ("len(word) <= 300", "len(word) < 300", "test_what_is_no_hello_is_not_read"),
    ("theirs.index >= mine.num_workers", "theirs.index > mine.num_workers", "test_the_first_difference_of_two_hellos_is_told"),
    ("{*theirs.versions, *mine.versions}", "mine.versions", "test_the_first_difference_of_two_hellos_is_told"),
    ("c if c.isascii() and c.isprintable() else ascii(c)[1:-1]", "c", "test_what_a_false_chief_says_is_shown_escaped"),
    (r'b"\x04\x00\x00\x00\x00\x00"', r'b"\x04\x00\x00\x00\x00\x01"', "test_a_program_that_is_not_the_chief_is_an_error_at_once"),
]
GROUND = [
    ("_env.py", "variable.get_int() or fallback.get_int()", "variable.get_int()", "tests/test_env.py::test_a_number_is_raised_for_the_block_only_and_never_lowered"),
    ("_env.py", "            del os.environ[variable.name]", "            pass", "tests/test_env.py::test_a_number_is_raised_for_the_block_only_and_never_lowered"),
    ("_env.py", "int(counts[-1])", "int(counts[0])", "tests/test_env.py::test_numbers_are_read_and_what_is_none_counts_as_unset"),
    ("_env.py", "if text.isdecimal() else", "if text else", "tests/test_env.py::test_numbers_are_read_and_what_is_none_counts_as_unset"),
    ("_env.py", "os.environ.setdefault(self.name, value)", "os.environ[self.name] = value", _RUNTIME + "test_the_implementation_is_told_to_jax_and_nccl"),
    ("_options.py", "member.name == given.upper()", "member.name == given", "tests/test_options.py::test_a_member_and_its_name_in_any_case_are_the_member"),
    ("_options.py", "ValueError if isinstance(given, str) else TypeError", "ValueError", "tests/test_options.py::test_another_type_is_refused_also_when_its_name_would_fit"),
    ("_options.py", "not 1 <= seconds <=", "not 0 <= seconds <=", "tests/test_options.py::test_wrong_options_are_refused"),
    ("_options.py", "if self.bytes_per_pack < 0", "if self.bytes_per_pack < -1", "tests/test_options.py::test_wrong_options_are_refused"),
    ("_options.py", "if self.prefetch < 0", "if self.prefetch < -1", "tests/test_options.py::test_wrong_options_are_refused"),
    ("_text.py", "c if c.isprintable() else ", "c if True else ", "tests/_command/test_output.py::test_the_tail_is_the_end_escaped_and_short"),
    ("_text.py", "text[-limit:]", "text[:limit]", "tests/_workers/test_guard.py::test_log_injection"),
    ("_text.py", "number == 1 else", "number <= 1 else", "tests/_command/test_ending.py::test_summaries"),
    ("_text.py", "ha{'ve' if len(workers) > 1 else 's'}", "has", "tests/_workers/test_stall.py::test_all_late_workers_are_named"),
    ("_text.py", "abs(value) < 10**20", "True", _RESOLVERS + "test_an_index_is_a_whole_number_of_a_task_that_exists"),
    ("_errors.py", "    exit_code = BAD_CONFIGURATION", "    exit_code = 1", "tests/test_options.py::test_errors_of_a_cluster_say_whether_to_start_again"),
    ("_errors.py", "exit_code: int = RESTART", "exit_code: int = BAD_CONFIGURATION", "tests/test_options.py::test_errors_of_a_cluster_say_whether_to_start_again"),
    ("launch.py", "not 1 <= int(text[:10])", "not 0 <= int(text[:10])", _GROUP + "test_usage_errors_are_one_line"),
    ("launch.py", "if port not in used", "if True", _GROUP + "test_a_port_that_the_kernel_gives_again_is_not_taken_again"),
    ("launch.py", "range(i * each, (i + 1) * each)", "range(each)", _GROUP + "test_workers_are_told_their_cluster_and_devices"),
    ("launch.py", "_env.JAX_PROCESS_ID: options.node_rank * options.n + i", "_env.JAX_PROCESS_ID: i", _GROUP + "test_workers_are_told_their_cluster_and_devices"),
    ("launch.py", "                del kept[variable.name]", "                pass", _GROUP + "test_the_launcher_s_cluster_wins_over_other_launchers"),
    ("launch.py", "options.node_rank >= options.nnodes", "options.node_rank > options.nnodes", _GROUP + "test_usage_errors_are_one_line"),
    ("launch.py", "code == 0 or not budget", "not budget", _GROUP + "test_a_restart_that_succeeds_is_a_success"),
    ("launch.py", "if options.nnodes > 1 else \"\"", "if False else \"\"", _GROUP + "test_logs_of_hosts_in_one_folder"),
    ("launch.py", "os.path.join(\".\", command[0])", "command[0]", _GROUP + "test_a_module_and_a_script_with_a_leading_dash"),
    ("launch.py", "fd = os.dup(fd)", "fd += 1", _GROUP + "test_a_launcher_without_standard_streams_runs"),
]  # fmt: skip
MUTANTS = [
    *(("_cluster/spec.py", old, new, _RESOLVERS + test) for old, new, test in _SPEC),
    *(("_cluster/environments.py", old, new, _RESOLVERS + test) for old, new, test in _ENVIRONMENTS),
    *(("_cluster/resolvers.py", old, new, _RESOLVERS + test) for old, new, test in _OF_RESOLVERS),
    *(("_cluster/meeting.py", old, new, _MEETING + test) for old, new, test in _OF_MEETING),
    *(("_cluster/gathering.py", old, new, _MEETING + test) for old, new, test in _GATHERING),
    *(("_cluster/hello.py", old, new, _MEETING + test) for old, new, test in _HELLO),
    *GROUND,
]
