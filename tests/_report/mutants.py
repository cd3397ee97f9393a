"""Small damages to the report and what it reads, each with the test that catches it."""

REPORT = "tests/_report/test_report.py::test_"
SAVED = "tests/_report/test_saved.py::test_"
TRACED = "tests/_report/test_traced.py::test_"
BAR = "tests/_report/test_bar.py::test_"
EXPLAIN = "tests/_strategy/test_strategy.py::test_explain_says_why_a_function_was_compiled_again"

MUTANTS = [
    ("_html.py", "html.escape(str(content))", "str(content)", REPORT + "the_page_says_what_the_run_was"),
    ("_report/facts.py", "os.replace(unfinished, path)", "path.write_text(unfinished.read_text())",
     REPORT + "a_report_replaces_the_last_one_and_leaves_nothing_when_it_fails"),
    ("_report/report.py", "elif not strategy.is_chief:", "elif False:", REPORT + "only_the_chief_writes"),
    ("_report/pictures.py", "split_sizes(num_rows, num_replicas)", "[1] * num_replicas",
     REPORT + "the_rows_of_a_batch_are_drawn_as_they_are_split"),
    ("_variables/equal_copies.py", "_remember(mesh, start, variables, str(error))", "pass",
     REPORT + "copies_that_differ_and_warnings_are_shown"),
    ("_program/program.py", "yield from _collectives_in(each.jaxpr,", "list(_collectives_in)(each.jaxpr,",
     REPORT + "functions_are_in_it_with_the_collectives_of_their_steps"),
    ("_transforms/function.py", "_programs.causes() if program.mesh == mesh", "_programs.causes()",
     REPORT + "functions_are_in_it_with_the_collectives_of_their_steps"),
    ("_program/cache.py", "(static_key(leaf[0]), shown(leaf[0]))", "(static_key(leaf[0]), repr(leaf[0]))", EXPLAIN),
    ("_program/cache.py", "leaf_names(call))\n        for", "leaf_names(call))\n        cause = ''\n        for", EXPLAIN),
    ("_html.py", "array.tobytes() for", "array.item(0) for", "tests/test_html.py::test_copies_that_differ_are_all_shown"),
    ("_report/profile.py", "        program.annotate = None\n", "        pass\n",
     "tests/_report/test_profile.py::test_a_profile_ends_when_the_block_fails_and_there_is_one_at_a_time"),
    ("_report/profile.py", "results[running.mesh] = list(made) or", "results[running.mesh] =",
     "tests/_report/test_profile.py::test_the_block_waits_for_programs_whose_results_nobody_has_asked_for"),
    ("_report/profile.py", "numbers[running.name] += 1", "numbers[running.name] = 1",
     "tests/_report/test_profile.py::test_each_run_is_a_step_with_its_name_and_number"),
    ("_report/facts.py", "by_worker.get(replica.worker, first)", "first", SAVED + "files_of_workers_are_one_page"),
    ("_report/facts.py", "    if version != _VERSION:", "    if False:", SAVED + "what_is_no_run_is_one_line"),
    ("_report/facts.py", "if num_workers == 1 else", "if True else", SAVED + "each_worker_has_a_file_of_its_own"),
    ("_report/bar.py", "strategy is not None and not strategy.is_chief", "False", BAR + "only_the_chief_shows_it"),
    ("_report/bar.py", "waited += time.perf_counter() - asked", "waited += 0",
     BAR + "it_passes_batches_on_and_shows_steps_and_the_share_of_the_input"),
    ("_report/traced.py", "max(end, ends.get(number, end))", "end",
     TRACED + "operations_of_cpus_count_where_they_are_innermost_and_until_they_end"),
    ("_report/traced.py", "until = min(last.end, operation.start)", "until = last.end",
     TRACED + "each_moment_counts_for_the_operation_that_began_last"),
    ("_report/traced.py", "key=lambda each: (each.start, -each.end)", "key=lambda each: each.start",
     TRACED + "each_moment_counts_for_the_operation_that_began_last"),
    ("_report/traced.py", "for line in streams or", "for line in streams +",
     TRACED + "operations_of_gpus_are_those_of_their_streams"),
    ("_report/traced.py", "    if missing:", "    if False:", TRACED + "what_cannot_be_read_has_a_reason"),
    ("_report/traced.py", 'if device.platform == "cpu"', "if False",
     TRACED + "cpus_have_the_number_of_the_job_and_gpus_that_of_the_process"),
    ("_report/profile.py", "if has_peers and set(seconds) == {COMPUTATION}", "if False",
     TRACED + "explain_and_the_page_show_the_last_profile"),
    ("_report/profile.py", "    if not has_peers:", "    if False:", TRACED + "one_replica_does_not_communicate"),
]  # fmt: skip
