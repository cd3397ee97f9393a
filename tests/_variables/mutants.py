"""Damages to variables, the arrays behind them, and the comparison of their copies."""

_EQ, _ST, _VA = (f"tests/_variables/test_{name}.py::test_" for name in ("equal_copies", "storage", "variable"))
_READ = "tests/_variables/test_bindings.py::test_"
_BAD = "tests/test_bad_input.py::test_bad_input_is_one_clear_error_and_changes_nothing"
_OFTEN = _EQ + "copies_are_compared_so_seldom_that_it_costs_one_percent"
_REFUSED = _VA + "without_aggregation_values_that_differ_and_writes_from_outside_are_refused_and_change_nothing"
_EACH = _VA + "each_write_gives_what_its_mode_says"
_TAKEN = _VA + "only_what_gives_the_array_away_costs_a_copy_and_is_noticed_one_by_one"
_OTHERS = _VA + "values_of_another_strategy_are_refused_and_plain_arrays_moved"
_LEFT = _ST + "a_home_that_a_variable_has_left_holds_nothing_of_it"
_HANDLER = _ST + "what_a_handler_of_a_signal_takes_at_any_call_of_a_step_stays"
_TURN = "tests/_variables/test_turns.py::test_"
_HINTS = _VA + "names_and_hints"

MUTANTS = [
    ("_variables/scatter.py", " and not (in_replica and spec.is_on_read)", "",
     "tests/_variables/test_scatter.py::test_rows_that_differ_by_replica_need_an_aggregation"),
    ("_variables/scatter.py", "spec.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA", "True",
     "tests/_variables/test_scatter.py::test_rows_that_differ_by_replica_need_an_aggregation"),
    ("_variables/scatter.py", "-size <= rows.min() and ", "",
     "tests/_variables/test_scatter.py::test_what_does_not_fit_is_refused_and_changes_nothing"),
    ("_variables/bindings.py", "if tracing.trace_state() != self._trace_state:\n            raise ContextError", "if False:\n"
     "            raise ContextError", _BAD + "[Variable.assign]"),
    ("_variables/bindings.py", "self._renew()\n", "pass\n", _READ + "a_body_reads_what_was_written_before_it"),
    ("_variables/bindings.py", "raise ReadInsideJit", "pass", _READ + "a_variable_may_be_read_inside_a_jit_of_an_eager_gradient"),
    ("_variables/bindings.py", "return self._fallback(variable) if value is None else value", "return self._fallback(variable)",
     _VA + "a_write_is_seen_by_the_next_read_of_the_step"),
    ("_variables/equal_copies.py", "counts).count(max(counts)) > 1", "counts).count(max(counts)) > 2",
     _EQ + "a_variable_that_another_worker_has_forgotten_is_left_out_and_the_others_are_compared"),
    ("_variables/equal_copies.py", "all(spec_of(variable).number in sums for sums in by_worker)", "True",
     _EQ + "a_variable_that_another_worker_has_forgotten_is_left_out_and_the_others_are_compared"),
    ("_variables/equal_copies.py", "return joint_programs.of_chief(_NAME, every)", "return every",
     _EQ + "all_workers_compare_as_seldom_as_the_chief_needs_it"),
    ("_variables/equal_copies.py", "    if any(len(set(copies)) > 1 for _, copies in sums):", "    if False:",
     _EQ + "one_flipped_bit_is_found_and_named"),
    ("_variables/equal_copies.py", "            self.next = due\n", "            pass\n", _EQ + "copies_that_differ_are_found_at"
     "_each_run_until_they_are_mended"),
    ("_variables/equal_copies.py", "due, self.next = self.next, self.next + self.every", "due = self.next",
     _EQ + "threads_that_run_one_program_do_not_all_compare"),
    ("_variables/equal_copies.py", "num_sharing * min(self._costs)", "num_sharing * max(self._costs)", _EQ + "one_slow_comparison"
     "_puts_nothing_off"),
    ("_variables/equal_copies.py", "ceil(num_sharing * ", "ceil(", _EQ + "programs_that_run_in_turns_share_one_percent"),
    ("_variables/equal_copies.py", "MAX_COST = 0.01", "MAX_COST = 0.1", _OFTEN),
    ("_variables/equal_copies.py", "if len(self._costs) < 2:", "if not self._costs:", _OFTEN),
    ("_variables/equal_copies.py", "    require_same_history([history", "    (lambda *_: None)([history", _EQ + "workers_that_did"
     "_other_things_are_told"),
    ("_variables/equal_copies.py", "and len(mesh.devices) > 1)", ")", _EQ + "with_one_replica_and_without_variables_nothing_is"
     "_watched"),
    ("_variables/initial.py", "aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)", "aggregation in ()", _HINTS),
    ("_variables/initial.py", 'f"variable_{next(_numbers)}"', '"variable"', _HINTS),
    ("_variables/initial.py", "or tracing.is_staging():", "or False:", _BAD + "[Variable]"),
    ("_variables/initial.py", 'if array.dtype.kind in "iu" else', 'if False else', _VA + "the_dtype_is_the_values_own_unless"
     "_given"),
    ("_variables/storage.py", "and places == [(home, index) for index in range(len(places))]", "", _ST + "a_home_is_for_exactly"
     "_these_variables_in_this_order"),
    ("_variables/storage.py", "while home.taken:", "while False:", _TAKEN),
    ("_variables/storage.py", "    _note_held(home, places)  # what", "    pass  # what",
     _HANDLER + "[True]"),
    ("_variables/storage.py", "            while home.taken:", "            if home.taken:", _HANDLER + "[False]"),
    ("_variables/storage.py", "            home.taken.discard(index)\n", "", _TAKEN),
    ("_variables/storage.py", "old.arrays[index] = None", "pass", _LEFT),
    ("_variables/storage.py", "        old.is_whole = False\n", "        pass\n", _LEFT),
    ("_variables/storage.py", "if home.lent:", "if False:",
     _TURN + "what_a_reader_holds_is_not_overwritten_and"
     "_costs_a_copy_only_meanwhile"),
    ("_variables/storage.py", "slot.array = lost", "pass",
     _TURN + "what_a_failing_program_has_overwritten_is_named_at_each_use_until"
     "_it_is_restored"),
    ("_variables/turns.py", "if claim.calls_host and is_in_callback:", "if False:",
     _TURN + "a_host_callback_reads_all_variables_and"
     "_writes_those_that_its_step_does_not[1]"),
    ("_variables/storage.py", "if index in old.taken or index in old.lent])", "if False])", _LEFT),
    ("_variables/storage.py", "if type(compiled) is Announced:  # now", "if False:  # now",
     _ST + "a_ctrl_c_at_any_call_of_a_step_of_several_workers_loses_nothing"),
    ("_variables/storage.py", "(pair[1] - 1) // MAX_COPIED_BYTES", "0", _ST + "only_some_megabytes_are_copied_at_once"),
    ("_variables/variable.py", "(not is_on_read) if trainable is None", "True if trainable is None", _HINTS),
    ("_variables/assignment.py", "jnp.copy(jnp.asarray(array)) if mesh.is_alone or isinstance(array, jax.Array) else array",
     "array", _VA + "arrays_that_went_in_stay_valid_and_unchanged"),
    ("_variables/variable.py", "self._slot.array = None", "pass", _ST + "a_variable_that_dies_frees_its_array_while_others_of"
     "_its_home_live"),
    ("_variables/variable.py", "if result is self._slot.array:", "if False:", _TAKEN),
    ("_variables/variable.py", 'name.startswith("_") or ', "", _VA + "what_a_variable_is_not"),
    ("_variables/variable.py", "return np.True_", "pass", _VA + "equality_compares_values_and_hashes_are_of_the_variables"),
    # writes
    ("_variables/assignment.py", "collectives.aggregate(self.spec.aggregation, update, axis)", "update", _EACH),
    ("_variables/assignment.py", "return self._marked(self._combined(update))", "return self._combined(update)",
     "tests/_jax/test_marks.py::test_only_unaggregated_mirrored_variables_mark_what_is_assigned"),
    ("_variables/assignment.py", "if spec.aggregation is VariableAggregation.SUM:\n", "if False:\n", _EACH),
    ("_variables/assignment.py", "if operand.num_replicas != spec.mesh.num_replicas:", "if False:", _OTHERS),
    ("_variables/assignment.py", "array.sharding.device_set != spec.mesh.stacked.device_set", "False", _OTHERS),
    ("_variables/assignment.py", "if operand.shape != spec.shape:", "if False:", _VA + "another_shape_is_refused_everywhere"),
    ("_variables/assignment.py", "if tuple(array.shape) != spec.shape:", "if False:",
     _VA + "another_shape_is_refused_everywhere"),
    ("_variables/variable.py", "        self._slot.note_taken()  # somebody", "        # somebody",
     _VA + "two_variables_never_share_what_a_step_overwrites"),
    ("_variables/variable.py", 'foreign_trace_message("written", self.name', 'foreign_trace_message("read", self.name',
     _BAD + "[Variable.assign]"),
    ("_variables/assignment.py", "if spec.aggregation is VariableAggregation.NONE:\n            raise ReplicasDiv",
     "if False:\n            raise ReplicasDiv", _REFUSED),
    ("_variables/variable.py", "frame.mesh is not None and frame.mesh != self._spec.mesh", "False", _OTHERS),
    ("_variables/assignment.py", "distribute(value, axis.size)", "distribute(value, 1)", _EACH),
]  # fmt: skip
