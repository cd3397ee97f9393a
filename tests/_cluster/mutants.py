"""Damages to `_cluster` and to the single files on the ground, by the test that catches them."""

_WING = {
    "test_meeting.py::test_a_chief_that_cannot_take_more_tells_all_at_once": [
        ("gathering", 'kind = "config" if error.errno in _TOO_MANY_FILES', 'kind = "config" if False'),
    ],
    "test_meeting.py::test_a_worker_may_open_as_many_files_as_it_is_allowed": [
        ("meeting", "    allow_open_files()\n", "    pass\n"),
    ],
    "test_resolvers.py::test_an_index_is_a_whole_number_of_a_task_that_exists": [
        ("spec", "0 <= self.task_id < count", "0 <= self.task_id <= count"),
    ],
    "test_resolvers.py::test_chief_workers_and_evaluator_know_their_places": [
        ("spec", 'self.spec.job("chief") + self.spec.job("worker")', 'self.spec.job("worker") + self.spec.job("chief")'),
    ],
    "test_resolvers.py::test_each_launcher_is_understood": [
        ("spec", "loopback if self.is_local else host", "host"),
        ("environments", "port + 1 if port < 65535 else port - 1", "port + 1"),
        ("environments", " and not launched)", ")"),
        ("resolvers", "_late(environment, there[0][1](environment))", "there[0][1](environment)"),
    ],
    "test_resolvers.py::test_the_digest_tells_clusters_apart_and_is_the_same_on_all_workers": [
        ("spec", " if None not in self.workers else tuple(a and str(split_address(a)[1]) for a in self.workers)", ""),
        ("spec", '[len(self.spec.job("chief")), known]', "[0, known]"),
    ],
    "test_resolvers.py::test_addresses_that_are_wrong_are_refused": [
        ("spec", "not ip.is_unspecified and ", ""),
        ("spec", 'int(match["port"]) > 65535', 'int(match["port"]) > 65536'),
    ],
    "test_resolvers.py::test_a_cluster_that_contradicts_itself_says_where": [
        ("spec", "host.lower(), port", "host, port"),
    ],
    "test_resolvers.py::test_a_malformed_tf_config_says_what_is_wrong_and_shows_a_right_one": [
        ("environments", "except (ValueError, RecursionError) as error:", "except ValueError as error:"),
    ],
    "test_resolvers.py::test_slurm_variables_that_do_not_fit_are_refused": [
        ("environments", " or sum(counts) != num_workers", ""),
        ("environments", "if node != expected", "if node > expected"),
    ],
    "test_resolvers.py::test_mpirun_in_a_slurm_allocation_is_not_taken_for_slurm": [
        ("environments", "has(environment, _env.MPI_LOCALNRANKS) or not _has_slurm(environment)", "True"),
    ],
    "test_resolvers.py::test_lists_of_slurm_hosts_are_expanded_in_their_order": [
        ("environments", 'f"{number:0{len(first)}}"', 'f"{number}"'),
    ],
    "test_resolvers.py::test_jobs_on_one_host_get_different_ports": [
        ("environments", 'job.encode(errors="replace")', 'b""'),
    ],
    "test_resolvers.py::test_an_indexed_job_needs_the_number_of_its_pods": [
        ("resolvers", "if number != str(index)", "if not number"),
    ],
    "test_resolvers.py::test_in_kubernetes_names_may_come_late_whoever_describes_the_cluster": [
        ("resolvers", "dataclasses.replace(read(environment), names_come_late=True)", "read(environment)"),
    ],
    "test_resolvers.py::test_resolvers_answer_as_in_tensorflow": [
        ("resolvers", "cluster.task_id if cluster.spec else None", "cluster.task_id"),
    ],
    "test_meeting.py::test_workers_that_are_alike_come_together_and_leave_the_port_free": [
        ("meeting", "host if own is None or _is_loopback(own) else own", "own or host"),
    ],
    "test_meeting.py::test_a_worker_does_not_take_its_own_connection_for_the_chief": [
        ("meeting", "if sock.getsockname() == sock.getpeername()", "if False"),
    ],
    "test_meeting.py::test_a_port_of_another_program_is_an_error_at_once": [
        ("meeting", "isinstance(answer, bytes) and not is_grpc(answer)", "False"),
    ],
    "test_meeting.py::test_only_in_kubernetes_a_name_may_appear_late": [
        ("meeting", "not cluster.names_come_late or clock.left", "clock.left"),
    ],
    "test_meeting.py::test_a_connection_to_a_host_that_vanished_does_not_stay": [
        ("meeting", "    keep_alive(sock)\n", ""),
    ],
    "test_meeting.py::test_a_program_that_is_not_the_chief_is_an_error_at_once": [
        ("meeting", "if len(buffer) > MAX_LINE or not may_be_ours(buffer)", "if not may_be_ours(buffer)"),
        ("hello", 'b"\\x04\\x00\\x00\\x00\\x00\\x00"', 'b"\\x04\\x00\\x00\\x00\\x00\\x01"'),
    ],
    "test_meeting.py::test_a_name_server_that_does_not_answer_holds_nobody_up": [
        ("meeting", "min(PATIENCE_SECONDS, max(0.1, clock.left)) - 0.1", "clock.left"),
    ],
    "test_meeting.py::test_a_chief_that_waits_for_its_port_says_so_less_and_less_often": [
        ("meeting", "min(clock.next_report, first_report), math.inf", "first_report, first_report"),
    ],
    "test_meeting.py::test_a_worker_that_waited_for_another_job_does_not_disturb_it": [
        ("meeting", "            clock.has_met_a_run = True\n            return", "            return"),
        ("gathering", "hello.is_late or self", "self"),
    ],
    "test_meeting.py::test_a_stranger_that_writes_slowly_is_cut_off": [
        ("gathering", "not peer.hello and time.monotonic() >= peer.until", "False"),
    ],
    "test_meeting.py::test_of_too_many_strangers_the_oldest_goes": [
        ("gathering", "len(strangers) > MAX_STRANGERS", "False"),
    ],
    "test_meeting.py::test_a_stranger_that_says_too_much_is_cut_off_at_once": [
        ("gathering", " or len(peer.buffer) > MAX_LINE", ""),
    ],
    "test_meeting.py::test_a_worker_that_connects_twice_is_one_worker": [
        ("gathering", "self._drop(before)", "pass"),
    ],
    "test_meeting.py::test_a_worker_that_left_unseen_may_come_again": [
        ("gathering", " and not before.is_gone()", ""),
    ],
    "test_meeting.py::test_strangers_neither_stop_the_chief_nor_keep_its_port": [
        ("gathering", "reset_on_close(peer.sock)", "pass"),
    ],
    "test_meeting.py::test_another_cluster_on_the_port_does_not_disturb_the_first": [
        ("gathering", "(hello.index == 0 or hello.is_late", "(hello.is_late"),
    ],
    "test_meeting.py::test_a_chief_that_only_its_own_host_can_reach_says_so": [
        ("gathering", "if self.cluster.is_local or not all", "if all"),
    ],
    "test_meeting.py::test_a_missing_worker_is_named_everywhere": [
        ("gathering", "            if peer.hello:\n                self._tell(peer)\n", "            pass\n"),
    ],
    "test_meeting.py::test_what_is_no_hello_is_not_read": [
        ("hello", "type(number) is int and ", "isinstance(number, int) and "),
        ("hello", "len(line) > MAX_LINE", "len(line) >= MAX_LINE"),
        ("hello", "len(word) <= 300", "len(word) < 300"),
    ],
    "test_meeting.py::test_the_first_difference_of_two_hellos_is_told": [
        ("hello", "theirs.index >= mine.num_workers", "theirs.index > mine.num_workers"),
    ],
    "test_meeting.py::test_what_a_false_chief_says_is_shown_escaped": [
        ("hello", "c if c.isascii() and c.isprintable() else ascii(c)[1:-1]", "c"),
    ],
}
_GROUND = {
    "test_env.py::test_a_number_is_raised_for_the_block_only_and_never_lowered": [
        ("_env", "variable.get_int() or fallback.get_int()", "variable.get_int()"),
        ("_env", "            del os.environ[variable.name]", "            pass"),
    ],
    "test_env.py::test_numbers_are_read_and_what_is_none_counts_as_unset": [
        ("_env", "int(counts[-1])", "int(counts[0])"),
        ("_env", "if text.isdecimal() else", "if text else"),
    ],
    "_workers/test_runtime.py::test_the_implementation_is_told_to_jax_and_nccl": [
        ("_env", "os.environ.setdefault(self.name, value)", "os.environ[self.name] = value"),
    ],
    "test_options.py::test_a_member_and_its_name_in_any_case_are_the_member": [
        ("_options", "cls.__members__.get(given.upper())", "cls.__members__.get(given)"),
    ],
    "test_options.py::test_another_type_is_refused_also_when_its_name_would_fit": [
        ("_options", "ValueError if isinstance(given, str) else TypeError", "ValueError"),
    ],
    "test_options.py::test_wrong_options_are_refused": [
        ("_options", "not 1 <= seconds <=", "not 0 <= seconds <="),
    ],
    "_command/test_output.py::test_the_tail_is_the_end_escaped_and_short": [
        ("_text", "c if c.isprintable() else ", "c if True else "),
    ],
    "_workers/test_guard.py::test_log_injection": [
        ("_text", "text[-limit:]", "text[:limit]"),
    ],
    "_workers/test_stall.py::test_all_late_workers_are_named": [
        ("_text", "ha{'ve' if len(workers) > 1 else 's'}", "has"),
    ],
    "test_options.py::test_errors_of_a_cluster_say_whether_to_start_again": [
        ("_errors", "    exit_code = BAD_CONFIGURATION", "    exit_code = 1"),
        ("_errors", "exit_code: int = RESTART", "exit_code: int = BAD_CONFIGURATION"),
    ],
    "_command/test_group.py::test_usage_errors_are_one_line": [
        ("launch", "not 1 <= int(text[:10])", "not 0 <= int(text[:10])"),
        ("launch", "options.node_rank >= options.nnodes", "options.node_rank > options.nnodes"),
    ],
    "_command/test_group.py::test_a_port_that_the_kernel_gives_again_is_not_taken_again": [
        ("launch", "if port not in used", "if True"),
    ],
    "_command/test_group.py::test_workers_are_told_their_cluster_and_devices": [
        ("launch", "range(i * each, (i + 1) * each)", "range(each)"),
        ("launch", "_env.JAX_PROCESS_ID: options.node_rank * options.n + i", "_env.JAX_PROCESS_ID: i"),
    ],
    "_command/test_group.py::test_the_launcher_s_cluster_wins_over_other_launchers": [
        ("launch", "                del kept[variable.name]", "                pass"),
    ],
    "_command/test_group.py::test_a_restart_that_succeeds_is_a_success": [
        ("launch", "code == 0 or not budget", "not budget"),
    ],
    "_command/test_group.py::test_logs_of_hosts_in_one_folder": [
        ("launch", 'if options.nnodes > 1 else ""', 'if False else ""'),
    ],
    "_command/test_group.py::test_a_module_and_a_script_with_a_leading_dash": [
        ("launch", 'os.path.join(".", command[0])', "command[0]"),
    ],
}
GROUND = [(f"{file}.py", old, new, f"tests/{test}") for test, damages in _GROUND.items() for file, old, new in damages]
MUTANTS = GROUND + [
    (f"_cluster/{file}.py", old, new, f"tests/_cluster/{test}") for test, damages in _WING.items() for file, old, new in damages
]
