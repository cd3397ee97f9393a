"""Damages to what we know of JAX."""

_C, _D, _J, _M, _P, _T, _U, _V = (f"tests/_jax/test_{n}.py::test_" for n in (
    "complaints", "distributed", "jaxprs", "marks", "primitives", "tracing", "user_code", "versions"
))  # fmt: skip
_SCANS = _J + "a_scan_has_constants_carry_and_rows_in_this_order"
_DEPENDS = _J + "what_an_equation_depends_on_and_sends"
_CACHES = _T + "inner_caches_are_shared_without_and_apart_with_a_token"
_HIGH = _T + "high_level_primitives_are_traced_as_what_they_stand_for"
_MARKED = _M + "a_mark_does_not_change_derivatives_or_batches"
_AXIS = _P + "a_collective_names_its_axis_in_a_parameter"

_SHOWN = _U + "the_traceback_has_the_users_lines_only"


MUTANTS = [
    ("_jax/complaints.py", "    jax.errors.TracerIntegerConversionError,\n", "", _C + "jaxs_complaints_are_known"),
    ("_jax/complaints.py", " and isinstance(error.obj, jax.Array)", "", _C + "other_errors_are_none_of_them"),
    ("_jax/user_code.py", " and isinstance(error, AssertionError | LookupError)", "",
     _U + "a_bug_of_ours_shows_its_lines"),
    ("_jax/user_code.py", "waiting += [link.__cause__, link.__context__]", "pass", _SHOWN),
    ("_jax/user_code.py", "_CONTEXTLIB, ", "", _SHOWN),
    ("_jax/user_code.py", 'if "JAX_TRACEBACK_FILTERING" not in note', "", _U + "a_public_function_shows_the_users_lines_only"),
    ("_jax/interrupts.py", "gc.callbacks.remove(callback)", "pass",
     "tests/_jax/test_interrupts.py::test_ctrl_c_during_a_garbage_collection_ends_the_program"),
    ("_replicas/mesh.py", "interrupts.send_ignored_again()", "pass",
     "tests/_jax/test_interrupts.py::test_ctrl_c_during_a_garbage_collection_ends_the_program"),
    ("_jax/distributed.py", ' or _cpu_collectives() != "gloo"', "", _D + "gloo_listens_where_the_other_workers_reach_this_one"),
    ("_jax/distributed.py", "process_id or 0", "process_id or 1", _D + "one_process_is_the_first_of_one"
     "_and_runs_no_preemption_service"),
    ("_jax/distributed.py", "(found[1], found[2])", "(found[2], found[1])", _D + "the_workers_whose_devices_are_known_and_late"
     "_are_told"),
    ("_jax/distributed.py", "if known:", "if True:", _D + "the_workers_whose_devices_are_known_and_late_are_told"),
    ("_jax/jaxprs.py", "_rank(a) > _rank(b)", "_rank(a) >= _rank(b)", _SCANS),
    ("_jax/jaxprs.py", "len(equation.invars) - num_carry - num_rows", "len(equation.invars) - num_carry", _SCANS),
    ("_jax/jaxprs.py", "cond - len(equation.outvars), body -", "body - len(equation.outvars), cond -",
     _J + "while_has_the_constants_of_its_condition_then_of_its_body_then_the_carry"),
    ("_jax/jaxprs.py", "counts.matvec + counts.vecmat, sum", "counts.matvec, sum", _J + "a_linear_solve_runs_the_solver_on_its"
     "_constants_and_the_right_side"),
    ("_jax/jaxprs.py", " and equation.primitive.name not in LOCAL", "", _AXIS),
    ("_jax/jaxprs.py", '"axis_index_groups") is not None', '"axis_index_groups") is None', _P + "groups_are_in_a_parameter"),
    ("_jax/jaxprs.py", "yield placement.mesh", "pass", _J + "meshes_are_found_at_any_depth"),
    ("_jax/jaxprs.py", "in CALLS else []", "not in CALLS else []", _J + "a_call_has_one_jaxpr_that_takes_its_operands_and_the"
     "_table_is_complete"),
    ("_jax/jaxprs.py", "return all(map(_is_local_and_plain, (equation, *inside(equation))))",
     "return _is_local_and_plain(equation)", _DEPENDS),
    ("_jax/jaxprs.py", "return any(map(is_collective, (equation, *inside(equation))))",
     "return is_collective(equation)", _DEPENDS),
    ("_jax/jaxprs.py", "yield from inner_constants(inner.jaxpr)", "pass", _J + "literals_and_constants_are_told_apart_and_those"
     "_of_functions_inside_are_found"),
    ("_jax/marks.py", "return self.purpose.name", "return self.where", _M + "notes_are_values_and_their_text_is_the_same_on_all"
     "_workers"),
    ("_jax/marks.py", '[tangent] = tangents', 'tangent = 2 * tangents[0]', _MARKED),
    ("_jax/marks.py", "note=note), dimensions[0])", "note=note), 0)", _MARKED),
    ("_jax/primitives.py", 'LOCAL = frozenset({"axis_index", "pvary"})', 'LOCAL = frozenset({"pvary"})', _AXIS),
    ("_jax/primitives.py", "reduce_window_sum reduce_xor", "reduce_window_sums reduce_xor", _P + "every_primitive_that_the_proof"
     "_knows_exists"),
    ("_jax/tracing.py", " and jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()", "", _T + "staging_means_that_operations_are"
     "_recorded"),
    ("_jax/tracing.py", "_cache_token(next(_process.cache_numbers))", "_cache_token(7)", _CACHES),
    ("_jax/tracing.py", "        renew()\n        yield renew", "        yield renew", _CACHES),
    ("_jax/tracing.py", "function.__wrapped__ = user_function", "pass", _T + "trace_binds_the_axis_and_speaks_of_the_users"
     "_function"),
    ("_jax/tracing.py", "calls.append(call.trace(*operands).lojax.jaxpr)", "calls.append(call.trace(*operands).jaxpr)", _HIGH),
    ("_jax/tracing.py", "        source_info=equation.source_info,\n", "", _HIGH),
    ("_jax/user_code.py", "stacklevel() -> int:\n", "stacklevel() -> int:\n    return 2\n", _U + "the_users_line_is_the_innermost"
     "_that_is_neither_ours_nor_jaxs"),
    ("_jax/user_code.py", "library_folders = (_PACKAGE_FOLDER, _JAX_FOLDER,", "library_folders = (_PACKAGE_FOLDER,",
     _U + "an_equation_knows_its_line"),
    ("_jax/user_code.py", "    return None\n", '    return "<unknown>"\n', _U + "an_equation_whose_line_jax_has_lost_has_none_and"
     "_the_pass_takes_the_one_around"),
    ("_jax/versions.py", "if OLDEST <= jax", "if OLDEST < jax", _V + "the_tried_range"),
    ("_jax/versions.py", "stacklevel=6", "stacklevel=5",
     _V + "an_untried_version_is_told_once_at_the_first_public_name_also_inside_a_trace"),
    ("_jax/versions.py", "version_info__ <= NEWEST", "version_info__ < (0, 13)", _V + "the_tried_range"),
    ("_jax/interpreter.py", "return self.join((decision, value))", "return value",
     "tests/_jax/test_interpreter.py::test_a_property_travels_through_loops_until_it_is_settled_and_through_what_decides"),
]  # fmt: skip
