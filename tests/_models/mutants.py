"""Damages to what makes Keras' variables ours, and lets its layers, optimizers and fit know about replicas."""

_HERE = "tests/_models/test_"

MUTANTS = [
    ("_models/keras_layers.py", "axis.each(num_elements)", "(1,) * axis.size",
     _HERE + "keras_layers.py::test_normalization_sees_the_global_batch_and_dropout_differs_by_replica"),
    ("_models/keras_fit.py", "    if mesh != mesh_of(dataset):", "    if False:",
     _HERE + "keras_fit.py::test_what_would_train_elsewhere_is_refused"),
    ("_models/keras_variables.py", " and tracing.is_for_this_call()", "",
     _HERE + "keras_variables.py::test_what_is_kept_is_refused"),
    ("_models/replaced.py", "            delattr(owner, name)\n", "            pass\n",
     _HERE + "replaced.py::test_the_table_is_in_place_inside_scopes_and_steps_and_undone_after_the_last"),
]  # fmt: skip
