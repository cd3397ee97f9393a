"""Damages to the making of a step's program: copies that differ, a factor of R, a hang, a stale value, wrong rows."""

PROOF = "tests/_program/test_proof.py::test_"
REFUSALS = "tests/_program/test_refusals.py::test_"
FACTORS = "tests/parity/test_silent_factor.py::test_"
GUARDS = "tests/_program/test_guards.py::test_"
TRACES = "tests/_program/uneven/test_traces.py::test_"
PROPERTIES = "tests/_program/uneven/test_properties.py::test_"
SINKS = "tests/_program/passes/test_sink_reductions.py::test_"
LOOPS = "tests/_program/uneven/test_loops.py::test_"
MEANS = "tests/_program/uneven/test_means.py::test_"

MUTANTS = [
    # -- copies that would differ, and hangs
    ("_program/advice.py", "max(kinds) if others is Said.ZERO else max(Gradient.BENT, *kinds)", "max(kinds)",
     "tests/_program/test_refusals.py::test_what_is_no_linear_function_of_own_gradients_is_not_to_be_summed"),
    ("_program/advice.py", "is_linear = len(differing) == 1 and differing[0] < len(factors)", "is_linear = True",
     "tests/_program/test_refusals.py::test_what_is_no_linear_function_of_own_gradients_is_not_to_be_summed"),
    ("_program/proof.py", "note.purpose is Purpose.ASSIGN and self.within is not None and", "False and",
     "tests/_transforms/test_loops.py::test_copies_that_would_differ_are_refused_inside_them_too"),
    ("_program/proof.py", " or jaxprs.is_over_groups(equation)", "", PROOF + "what_may_differ_is_varying_and_says_why"),
    ("_program/proof.py", "if decision is not None and not decision.is_mirrored:", "if False:",
     PROOF + "a_collective_that_some_replicas_may_skip_is_refused"),
    ("_program/refusals.py", "if note.purpose is Purpose.ASSIGN and not state.is_mirrored", "if False",
     PROOF + "refusals_find_the_variable_and_the_line"),
    # -- a lost variable, an ended process
    ("_program/program.py", "placement.unshared(self.mesh, arrays, storage.held_arrays())", "arrays",
     "tests/_program/test_program.py::test_of_an_array_given_twice_or_also_closed_over_a_copy_is_donated"),
    ("_variables/variable.py", "self._keep(placed_copy(value", "self._keep(placed(value",
     "tests/_program/test_program.py::test_a_variable_keeps_its_memory_when_what_it_was_given_or_gave_is_donated"),
    ("_program/program.py", " or have_explicit_axes(equations)", "",
     "tests/_program/test_closed_over.py::test_an_array_on_a_mesh_with_explicit_axes_is_an_argument"),
    # -- a factor of R
    ("_program/advice.py", "Advice(min(old.said, Said.COMBINED))", "Advice(old.said)",
     REFUSALS + "gradients_that_were_combined_before_are_refused"),
    ("_program/refusals.py", "if note.purpose is Purpose.MEAN and state.advice.said is Said.SHARE]", "if False]",
     FACTORS + "a_factor_is_said_in_any_library_and_right_steps_are_silent[by_tree_in_a_variable-2]"),
    ("_program/uneven/traces.py", "        self._kinds.check_lengths(sizes)\n", "",
     "tests/test_losses.py::test_losses_of_another_length_than_rows_are_refused_where_the_replicas_do_not_divide_the_batch"),
    ("_program/uneven/traces.py", "is_gathered = set(lengths) == {sum(rows)}", "is_gathered = False",
     "tests/test_losses.py::test_lengths_in_the_ratio_of_rows_and_the_lines_for_others_are_those_of_one_device"),
    ("_program/uneven/traces.py", "if lengths == tuple([times * num_rows for num_rows in rows]):", "if False:",
     "tests/test_losses.py::test_lengths_in_the_ratio_of_rows_and_the_lines_for_others_are_those_of_one_device"),
    ("_program/uneven/value_numbering.py", "alone.results.index(position)", "0",
     LOOPS + "what_needs_no_rows_beside_them_in_a_loop_may_be_assigned[swapped]"),
    ("_program/advice.py", "curved = curved or advice.curved", "curved = curved",
     REFUSALS + "what_is_not_linear_in_a_share_is_said_with_the_shares_line_and_the_lines_to_write_are_right"),
    # -- stale values
    ("_program/guards.py", "if expected is not None and id(value) != expected and content_key(value) != content:", "if False:",
     GUARDS + "a_changed_name_is_seen_and_goes_to_and_fro_between_two_programs[attribute]"),
    ("_program/own_code.py", "self._same += zip(known, places, strict=True)", "pass",
     "tests/_program/test_fast_path.py::test_a_function_that_is_closed_over_twice_may_become_two"),
    ("_program/call.py", "array = np.array(leaf)", "array = np.asarray(leaf)",
     "tests/_program/test_steps.py::test_a_host_array_may_be_filled_again_at_once"),
    ("_program/lift.py", "Bindings({}, ask_for, renew)", "Bindings({}, ask_for, lambda: None)",
     "tests/_program/test_lift.py::test_a_helper_that_reads_a_variable_sees_its_value_of_the_moment"),
    # -- uneven steps
    ("_program/uneven/traces.py", "all(of_kind.answers == list(map(kinds.on_replicas, known)) for of_kind in sizes)", "True",
     PROPERTIES + "right_steps_equal_one_device"),
    ("_program/uneven/merge.py", "[value][tuple(slice(size) for size in value.aval.shape)]", "[value]",
     PROPERTIES + "padding_is_never_seen_along_any_axis"),
    ("_program/uneven/value_numbering.py", "pair is None or _key(node) != _key(pair):", "pair is None:",
     TRACES + "steps_that_uneven_replicas_cannot_take_together_are_refused"),
    ("_program/uneven/value_numbering.py", "_without_gradient(traces, differing) or explain", "explain",
     "tests/_program/uneven/test_match_collectives.py::test_a_replica_without_rows_takes_no_gradient_of_a_mean_over_its_own_rows"),
    ("_jax/marks.py", "note.purpose is Purpose.NO_DERIVATIVE and type(tangent)", "False and type(tangent)",
     LOOPS + "a_derivative_of_the_whole_step_is_refused_where_a_call_with_its_own_is_taken_apart"),
    ("_replicas/collectives.py", "by_rows and op is ReduceOp.MEAN and axis", "op is ReduceOp.MEAN and axis",
     MEANS + "whatever_it_is_each_replica_weighs_as_much_as_it_has_rows"),
    # -- several replicas on a device
    ("_program/passes/virtual.py", "_swap(operands[k], is_own[k])", "operands[k]",
     "tests/_program/passes/test_virtual.py::test_collectives_and_loops_are_those_of_as_many_devices"),
    ("_program/passes/virtual.py", " or any(_has_references(c.jaxpr) for c in called)", "",
     "tests/_program/passes/test_virtual.py::test_references_work_between_collectives_and_are_refused_across_one"),
    ("_program/passes/sink_reductions.py", "is_wider=dtype != value.aval.dtype", "is_wider=False",
     SINKS + "a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices[2]"),
    ("_program/passes/sink_reductions.py", "jnp.promote_types(own_dtype, dtype) in (own_dtype, dtype)", "True",
     SINKS + "a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices[2]"),
    ("_program/passes/sink_reductions.py", "    if _overflows(node, dtype):", "    if False:",
     SINKS + "a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices[2]"),
    ("_program/passes/sink_reductions.py", " and not _overflows(node, dtype):", ":",
     SINKS + "a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices[2]"),
    ("_program/passes/sink_reductions.py", "if _sunk(node.inputs[position], read, totals, dtype) is None:", "if True:",
     SINKS + "no_replica_has_a_gradient_that_a_scan_adds_up"),
    ("_program/passes/virtual.py", "added = [self.splits(node.equation) and end", "added = [False and end",
     SINKS + "no_replica_has_a_gradient_that_a_scan_adds_up"),
    ("_program/passes/virtual.py", "behind[k], value.maker = value, None", "behind[k] = value",
     SINKS + "no_replica_has_a_gradient_of_layers_of_its_own"),
    ("_program/mistakes.py", "num_devices > 1", "num_devices > 2",
     "tests/_program/test_mistakes.py::test_an_ordered_print_is_refused_on_several_devices[odd]"),
    ("_program/program.py", " or places", "",
     "tests/_program/test_mistakes.py::test_a_step_names_no_devices[1]"),
    ("_program/mistakes.py", "max(num_devices, ", "max(1, ",
     "tests/_program/test_mistakes.py::test_a_map_over_devices_in_a_step_is_refused[6-1-3]"),
    ("_program/passes/virtual.py", "return follows and all(", "return False and all(",
     SINKS + "no_replica_has_a_gradient_of_its_own"),
    ("_program/passes/sink_reductions.py", "jnp.asarray(zeros, dtype), updates.astype(dtype)", "zeros, updates",
     SINKS + "a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices[2]"),
    ("_program/passes/sink_reductions.py", "dtype=dtype)", "dtype=stack.dtype)",
     SINKS + "a_wide_sum_of_narrow_values_is_as_exact_as_that_of_devices[2]"),
    ("_program/dispatch.py", "(*call.arrays, *program.constants)", "call.arrays",
     "tests/test_bad_input.py"),
]  # fmt: skip
