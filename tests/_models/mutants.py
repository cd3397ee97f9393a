"""Damages to the door for model libraries, and to what makes Keras' variables ours."""

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
    ("_models/objects.py", "        if structure != whole.structure:", "        if False:",
     _HERE + "library.py::test_wrong_steps_are_refused_in_the_words_of_the_library_and_change_nothing"),
    ("_models/libraries.py", " for library in LIBRARIES if library.package in sys.modules]", " for library in LIBRARIES]",
     _HERE + "library.py::test_a_library_that_the_program_has_not_imported_is_not_asked"),
]  # fmt: skip
