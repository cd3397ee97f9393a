"""Damages to what makes Keras' variables ours, and lets its layers, optimizers and fit know about replicas."""

_K, _L, _F, _S = (f"tests/_models/test_keras{name}.py::test_" for name in ("", "_layers", "_fit", "_state"))
_NET = _L + "a_conv_net_learns_as_on_one_device[5-adam]"
_V = "tests/_models/test_keras_variables.py::test_"
_WRONG = _L + "wrong_recipes_are_refused_and_change_nothing"
_BATCH = _L + "normalization_sees_the_global_batch_and_dropout_differs_by_replica"
_MET = _K + "variables_are_taken_over_where_a_step_meets_or_makes_them"
_FIT = _F + "fit_is_that_of_one_device[4-small-options0]"
_ELSEWHERE = _F + "what_would_train_elsewhere_is_refused"
_SAVED = _S + "a_model_goes_on_where_it_was_saved"

_R = "tests/_models/test_replaced.py::test_"
_TABLE = _R + "the_table_is_in_place_inside_scopes_and_steps_and_undone_after_the_last"
_NORM = "tests/_models/test_normalization.py::test_"

MUTANTS = [
    (
        "_models/equinox.py",
        "        is_inside = True",
        "        is_inside = False",
        "tests/_models/test_equinox.py::test_numbers_in_a_module_are_compiled_in_and_others_are_traced",
    ),
    ("_models/normalization.py", "and layer.axis_name is None", "", _NORM + "a_linen_layer_with_an_axis_name_is_left_alone"),
    (
        "_models/equinox.py",
        "(*names, REPLICA_AXIS)",
        "names",
        _NORM + "an_equinox_layer_normalizes_over_the_replicas_besides",
    ),
    ("_models/keras.py", "for _ in range(MAX_TRACES):", "for _ in range(1):", _MET),
    (
        "_models/keras.py",
        "        if scope.strangers:\n",
        "        if False:\n",
        _K + "gradients_and_optimizers_of_ours_take_keras_variables",
    ),
    ("_models/keras_variables.py", " and tracing.is_for_this_call()", "", _V + "what_is_kept_is_refused"),
    (
        "_models/keras_variables.py",
        "tracing.untraced() if is_passing else contextlib.nullcontext()",
        "contextlib.nullcontext()",
        _V + "what_is_traced_for_one_call_sees_the_value_of_this_moment",
    ),
    ("_models/keras_variables.py", "        elif _process.is_keras_update.get():", "        elif False:", _NET),
    ("_models/keras_variables.py", ".assign(value)\n\n\ndef is_keras", "\n\n\ndef is_keras", _MET),
    ("_models/keras_variables.py", "state | {keras_parts.VALUE: self._value}", "state", _SAVED),
    ("_models/keras_scope.py", "    found += make()\n", "", _MET),
    (
        "_models/keras_scope.py",
        "collect_losses=True",
        "collect_losses=False",
        _L + "losses_constraints_and_mixed_precision_are_as_on_one_device",
    ),
    (
        "_models/keras_layers.py",
        "dict(zip(present, replica.all_reduce(ReduceOp.SUM, marked), strict=True))",
        "dict(zip(present, marked, strict=True))",
        _NET,
    ),
    ("_models/keras_layers.py", "axis.each(num_elements)", "(1,) * axis.size", _BATCH),
    ("_models/keras_layers.py", "jnp.where(index == 0, seed, jax.random.fold_in(seed, index))", "seed", _BATCH),
    ("_models/keras_layers.py", "jnp.sum(squares + counts * (means - mean) ** 2, 0)", "jnp.sum(squares, 0)", _BATCH),
    (
        "_models/replaced.py",
        "            if (owner, name) not in _process.replaced:\n",
        "            if True:\n",
        _R + "who_replaces_ours_in_a_scope_stays_and_ours_does_its_work_once",
    ),
    ("_models/replaced.py", "            if not _process.num_replacing:\n", "            if True:\n", _TABLE),
    (
        "_models/replaced.py",
        "            delattr(owner, name)\n",
        "            pass\n",
        _TABLE,
    ),
    (
        "_models/replaced.py",
        "            continue  # somebody",
        "            pass  # somebody",
        _R + "who_replaces_ours_in_a_scope_stays_and_ours_does_its_work_once",
    ),
    (
        "_models/replaced.py",
        "    if model in _process.keras_models:",
        "    if False:",
        _R + "a_model_of_no_scope_that_a_step_has_taken_over_is_fitted_outside_with_a_warning",
    ),
    ("_models/keras_scope.py", "with in_place(), scope:", "with scope:", _TABLE),
    ("_models/keras_fit.py", "where = mesh.stacked if is_divided else mesh.mirrored", "where = mesh.stacked", _FIT),
    ("_models/keras_fit.py", "    if mesh != mesh_of(dataset):", "    if False:", _ELSEWHERE),
    ("_models/keras_fit.py", "if mesh is not None and here is not None and mesh != here:", "if False:", _ELSEWHERE),
    (
        "_models/keras_fit.py",
        "        adopt(variable, mesh)\n",
        "        pass\n",
        _F + "a_model_is_trained_by_steps_and_by_fit_in_turns_and_by_distributed_datasets",
    ),
    ("_models/keras_state.py", 'return f"{stem}_{index}" if index else stem', "return part", _SAVED),
]
