"""Damages to devices, values of many replicas and their collectives."""

_COL, _CON, _CRO, _IN, _ME, _PE, _PL = (f"tests/_replicas/test_{n}.py::test_" for n in (
    "collectives", "context", "cross_replica", "in_flight", "mesh", "per_replica", "placement"
))  # fmt: skip
_SPENT = "tests/_replicas/test_spent.py::test_"
_HOST = "tests/_replicas/test_host_memory.py::test_"
_TOGETHER = "tests/_replicas/test_together.py::test_a_tree_of_small_arrays_is_one_program_and_few_sums"
_VAR = "tests/_variables/test_variable.py::test_"
_BAD = "tests/test_bad_input.py::test_bad_input_is_one_clear_error_and_changes_nothing"
_CONVERTED = _VAR + "a_value_is_converted_to_a_kind_that_holds_it_and_refused_where_it_would_lose_information"
_MANY = _COL + "collectives_and_their_gradients_for_every_number_of_replicas"
_MIXED = _COL + "a_mixed_tree_is_reduced_leaf_by_leaf_and_keeps_its_structure_and_dtypes"
_PACKED = _COL + "small_arrays_of_one_dtype_are_packed_and_large_ones_travel_as_they_are"
_OUT = _COL + "a_context_is_of_no_use_outside_its_step"
_PLACES = _CON + "context_functions_in_every_place"
_SPLIT = _CRO + "a_split_is_as_fair_as_it_can_be_and_keeps_the_extremes"
_PADDING = _CRO + "the_padding_is_never_seen_whatever_is_in_it_nor_taken_for_data"
_STARTED = _IN + "older_programs_are_waited_for_before_there_are_too_many"
_JOINED = _IN + "two_programs_of_several_workers_are_in_flight_and_older_ones_are_checked"
_WRONG = _ME + "wrong_devices"
_TREE = _PE + "its_only_leaf_is_the_stacked_array_and_different_shapes_are_part_of_the_structure"

_ADDING = "tests/_strategy/test_adding_up.py::test_"

MUTANTS = [
    ("_replicas/collectives.py", "if axis.size > 1 else", "if axis.size > 0 else",
     "tests/_program/test_fuse_all_reduces.py::test_one_replica_copies_nothing_into_buffers_and_its_results_are_their_own_sums"),
    ("_replicas/collectives.py", " or self.ops is not None", "",
     _ADDING + "a_function_of_the_users_takes_the_place_of_the_sum"),
    ("_replicas/collectives.py", "dataclasses.replace(axis, ops=None)).astype", "axis).astype",
     _ADDING + "a_function_of_the_users_takes_the_place_of_the_sum"),
    ("_replicas/arrays.py", "if given > own:", "if given > own + 1:", _CONVERTED),
    ("_replicas/arrays.py", "return 1 if is_weak and kind == 2 else kind", "return kind",
     _VAR + "a_python_number_in_a_step_gives_no_weak_type"),
    ("_replicas/arrays.py", "smallest < limits.min or", "smallest < limits.min and", _BAD + "[Strategy.reduce]"),
    ("_replicas/arrays.py", 'or getattr(array, "weak_type", False)\n    return jax', "\n    return jax",
     _VAR + "a_python_number_in_a_step_gives_no_weak_type"),
    ("_replicas/arrays.py", "not np.array_equal(converted, array)", "False", _CONVERTED),
    ("_replicas/collectives.py", "return jax.lax.axis_index(REPLICA_AXIS) if self.bound else 0",
     "return jax.lax.axis_index(REPLICA_AXIS)", _COL + "the_default_context_is_one_replica_that_reaches_itself"),
    ("_replicas/collectives.py", "if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):\n            data", "if False:\n"
     "            data", _COL + "all_gather_takes_nests_of_any_dtype_and_random_keys"),
    ("_replicas/collectives.py", "if own else axis.size", "if own else 1", _MANY),
    ("_replicas/collectives.py", "num_bytes >= PACK_BELOW_BYTES", "num_bytes > PACK_BELOW_BYTES", _PACKED),
    ("_replicas/collectives.py", "pack else 1)", "pack else 0)", _COL + "the_compiled_program_has_one_all_reduce_for_each"
     "_dtype"),
    ("_replicas/collectives.py", "if held >= limit:", "if held > limit:", _PACKED),
    ("_replicas/collectives.py", "jnp.stack([array.real, array.imag]) if jnp.iscomplexobj(array) else array", "array", _MIXED),
    ("_replicas/collectives.py", "np.dtype(np.int32)", "np.dtype(np.float32)", _MIXED),
    ("_replicas/collectives.py", "return jnp.promote_types(dtype, jnp.float32)", "return dtype", _MANY),
    ("_replicas/collectives.py", "mean = total / float(count)", "mean = total / count", _CRO + "a_mean_neither_overflows_nor"
     "_rounds_to_zero"),
    ("_replicas/collectives.py", "if not -ndim <= axis < ndim:", "if not -ndim <= axis <= ndim:", _BAD + "[Strategy.gather]"),
    ("_replicas/collectives.py", "isinstance(axis, bool) or ", "", _BAD + "[ReplicaContext.all_gather]"),
    ("_replicas/collectives.py", "jnp.where(axis.index() == 0,", "jnp.where(axis.index() <= 1,",
     _CON + "the_remedies_work"),
    ("_replicas/context.py", "frame.strategy is self._strategy and frame", "frame", _OUT),
    ("_replicas/context.py", "is_current = not self._axis.bound and", "is_current =", _OUT),
    ("_replicas/context.py", "if uneven_shapes(value) is not None:", "if False:",
     _COL + "what_goes_wrong_in_merge_call_reaches_the_user"),
    ("_replicas/context.py", "strategy=self._strategy, replica=None, axis", "strategy=self._strategy, axis", _PLACES),
    ("_replicas/context.py", "or array.dtype == jnp.uint32", "", _CON + "rng_is_different_on_each_replica_and_the_same_in_every"
     "_run"),
    ("_replicas/context.py", "isinstance(args, tuple | list)", "hasattr(args, '__len__')", _BAD + "[ReplicaContext.merge_call]"),
    ("_replicas/host_memory.py", "-memory.ctypes.data % _ALIGNMENT", "0", _HOST + "each_row_of_large_memory_can_be_kept"),
    ("_replicas/host_memory.py", "first + i: row", "i: row", _HOST + "a_large_gather_on_this_machine_is_no_program"),
    ("_replicas/host_memory.py", "parts[i] if shapes is None else", "parts[i] if True else",
     _HOST + "a_large_gather_on_this_machine_is_no_program"),
    ("_replicas/cross_replica.py", "groups_of(rows, 0, MAX_ARRAYS_TOGETHER)", "groups_of(rows, 0, 1)",
     "tests/_replicas/test_together.py::test_large_arrays_of_a_tree_travel_alone"),
    ("_replicas/collectives.py", "math.prod(shape) for shape in shapes", "1 for shape in shapes", _TOGETHER),
    ("_replicas/cross_replica.py", "axis) < rows", "axis) <= rows", _PADDING),
    ("_replicas/cross_replica.py", "return result * jnp.asarray(num_replicas).astype(result.dtype) if op is",
     "return result if op is",
     _CRO + "of_a_mirrored_value_the_sum_is_r_times_it_and_the_mean_itself"),
    ("_replicas/cross_replica.py", "value - part * (num_replicas - 1))", "part)", _SPLIT),
    ("_replicas/cross_replica.py", "jnp.where(part == 0, value, value - part", "jnp.where(False, value, value - part",
     _VAR + "a_sum_keeps_a_subnormal"),
    ("_replicas/cross_replica.py", "jnp.sum(~is_zero, axis=0) == 1", "False",
     _VAR + "a_sum_keeps_a_subnormal"),
    ("_replicas/collectives.py", "0 < count <= _MAX_EXACT_COUNT", "False", _CRO + "a_mean_of_integers_rounds_once"),
    ("_replicas/collectives.py", "0 < count <= _MAX_EXACT_COUNT", "0 < count", _CRO + "a_mean_of_integers_rounds_once"),
    ("_replicas/cross_replica.py", " if a not in axes) for shape", ") for shape", _CRO + "sizes_may_differ_along_several_axes"
     "_when_all_are_reduced"),
    ("_replicas/cross_replica.py", ".astype(stack.dtype)", "", _CRO + "aggregation_makes_one_value_of_the_copies"),
    ("_replicas/frames.py", "        _process.frame.reset(token)", "        pass", _CON + "an_exception_leaves_every_place"),
    ("_replicas/frames.py", "frame.strategy is not None and frame.replica is None", "frame.replica is None", _PLACES),
    ("_replicas/frames.py", "if frame.strategy is not strategy:", "if False:", _CON + "no_scope_in_that_of_another_strategy_nor"
     "_in_a_step"),
    ("_replicas/in_flight.py", "len(_process.in_flight) >= MAX_IN_FLIGHT:\n", "len(_process.in_flight) > MAX_IN_FLIGHT:\n",
     _STARTED),
    ("_replicas/in_flight.py", "MAX_IN_FLIGHT = 16", "MAX_IN_FLIGHT = 32", _STARTED),
    ("_replicas/in_flight.py", "for old in reversed(waited_for)", "for old in waited_for", _STARTED),
    ("_replicas/in_flight.py", "        if not old.is_deleted():  # XLA", "        if True:  # XLA",
     _IN + "a_result_that_was_deleted_is_not_waited_for"),
    ("_replicas/in_flight.py", "progress.finished += 1", "pass", _JOINED),
    ("_replicas/in_flight.py", "if witness is None or witness.is_deleted():", "if witness is None:", _JOINED),
    ("_replicas/in_flight.py", "    if not isinstance(witness.dtype, np.dtype):", "    if False:", _IN + "keys_of_random_numbers"
     "_are_watched_as_their_data"),
    ("_replicas/in_flight.py", "not isinstance(witness, jax.core.Tracer) and", "", _IN + "a_traced_program_is_not_in_flight_and_a"
     "_result_is_passed_on"),
    ("_replicas/mesh.py", "max(2 * num_devices,", "max(num_devices,", _ME + "pool_is_twice_the_devices_and_not_below_the_cores"),
    ("_replicas/mesh.py", ", re.IGNORECASE | re.ASCII", "", _ME + "spellings_and_lists_of_devices"),
    ("_replicas/mesh.py", " and index >= MAX_CPU_DEVICES:", " and index > MAX_CPU_DEVICES:", _WRONG),
    ("_replicas/mesh.py", "if index < len(available):", "if index <= len(available):", _WRONG),
    ("_replicas/mesh.py", "if device in found:", "if False:", _WRONG),
    ("_replicas/mesh.py", "len(set(owned.values())) > 1 or", "", _ME + "workers_with_different_devices_are_refused"),
    ("_replicas/mesh.py", "key=lambda device: (device.process_index, device.id)", "key=lambda device: device.process_index",
     _ME + "workers_with_different_devices_are_refused"),
    ("_replicas/mesh.py", 'max([index + 1 for platform, index in filter(None, places) if platform == "cpu"], default=0)',
     "len(places)", _WRONG),
    ("_replicas/per_replica.py", "if len(set(sizes)) == 1 else None", "", _PE + "it_shows_shape_and_dtype_of_one_replica_and"
     "_values_without_padding"),
    ("_replicas/per_replica.py", "rows.setdefault(first + i, shard.data[i])", "rows[len(rows)] = shard.data[i]",
     _PE + "values_are_right_wherever_tree_map_put_them"),
    ("_replicas/per_replica.py", "for i in sorted(rows)}", "for i in sorted(rows, reverse=True)}", _PE + "values_are_in_replica"
     "_order_each_on_its_own_device"),
    ("_replicas/per_replica.py", "PerReplica(children[0], shapes)", "PerReplica(children[0])", _TREE),
    ("_replicas/per_replica.py", '"trunc": "`math.trunc`",', "", _PE + "every_use_as_one_array_is_refused_with_the_ways_out"),
    ("_replicas/per_replica.py", 'name == "numpy" or ', "", _PE + "a_method_of_arrays_is_missing_with_the_ways_out"),
    ("_replicas/placement.py", "row[column] != rows[0][column]", "row[column] != rows[-1][column]", _PL + "an_array_that_the"
     "_workers_computed_otherwise_is_named"),
    ("_replicas/placement.py", "0 if array.is_deleted() else ", "", _PL + "an_array_that_the_workers_computed_otherwise_is"
     "_named"),
    ("_replicas/placement.py", "if array.sharding.device_set != mesh.mirrored.device_set:", "if False:", _PL + "workers_agree_on"
     "_what_is_sent_before_it_is_compiled"),
    ("_replicas/placement.py", "on_difference(position, sorted(", "on_difference(column, sorted(", _PL + "workers_that_differ"
     "_are_named"),
    ("_replicas/placement.py", "return bits.view(dtype)", "return bits.view(dtype)[::-1]", _PL + "an_array_survives_being_sent"
     "_as_bits"),
    ("_replicas/placement.py", "reshape(-1).view(np.uint8).data)", "reshape(-1).astype(np.uint8).data)", _PL + "a_changed_element"
     "_of_any_dtype_is_found"),
    ("_replicas/in_flight.py", "(joined if is_joint(placement) else started)", "started",
     _PL + "what_is_mirrored_again_is_waited_for_like_any"
     "_program"),
    ("_replicas/spent.py", "self.num_steps < MIN_STEPS", "self.num_steps < 1", _SPENT + "nothing_is_said_of_a_few_steps_and_a"
     "_line_of_many"),
    ("_program/steps.py", "- (waited.devices - waited_before)", "", _SPENT + "waiting_for_programs_in_flight_is_no_python"),
    ("_program/steps.py", "        self.spent.last = None\n", "", _SPENT + "the_parts_of_a_loop_add_up_and_a_step_that_is"
     "_compiled_begins_it_anew"),
    ("data/_iterator.py", "waited.input += time", "waited.input -= time", _SPENT + "waiting_for_a_batch_is_input"),
]  # fmt: skip
