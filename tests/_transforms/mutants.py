"""Damages to loops, gradients and `mr.function`."""

MUTANTS = [
    ("_transforms/loops.py", "zip(written, after, strict=True)", "zip(written, before, strict=True)",
     "tests/_transforms/test_loops.py::test_cond_takes_the_branch_that_the_condition_says_and_keeps_the_rest"),
    ("_transforms/loops.py", "lambda s: s[1:]", "lambda s: s[:1]",
     "tests/_transforms/test_loops.py::test_stacked_odd_batches_train_in_one_loop[R3]"),
    ("_program/dispatch.py", "tracing.current_trace() is not tracing.NO_TRACE or ", "",
     "tests/_transforms/test_function.py::test_jaxs_transformations_go_around_each_verb[grad]"),
    ("_transforms/gradients.py", "list(bindings.written)", "[]",
     "tests/_transforms/test_gradients.py::test_what_the_loss_writes_is_kept"),
]  # fmt: skip
