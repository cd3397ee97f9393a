"""Small damages to loops, gradients and `mr.function`, each with the test that catches it."""

LOOPS = "tests/_transforms/test_loops.py::test_"
GRADIENTS = "tests/_transforms/test_gradients.py::test_"
FUNCTION = "tests/_transforms/test_function.py::test_"

IN_A_LOOP = FUNCTION + "a_function_in_a_loop_is_known_by_a_few_looks_and_is_another_with_what_it_reads"

MUTANTS = [
    ("_transforms/function.py", " and fast_path.key[1] == strategy:", ":", IN_A_LOOP),
    ("_transforms/function.py", "    elif not kwargs and program is not None:", "    elif False:", IN_A_LOOP),
    ("_transforms/loops.py", "_map_whole(_replicas_first, ys)", "ys",
     LOOPS + "steps_in_a_scan_take_per_replica_rows_carries_and_results"),
    ("_transforms/loops.py", "zip(written, after, strict=True)", "zip(written, before, strict=True)",
     LOOPS + "cond_takes_the_branch_that_the_condition_says_and_keeps_the_rest"),
    ("_transforms/loops.py", "        for body in bodies:\n", "        for body in bodies[:1]:\n",
     LOOPS + "cond_takes_the_branch_that_the_condition_says_and_keeps_the_rest"),
    ("_transforms/loops.py", " or length < 0)", ")", LOOPS + "wrong_bodies_bounds_and_rows_are_refused"),
    ("_transforms/loops.py", "if array.ndim == 0:", "if False:", LOOPS + "wrong_bodies_bounds_and_rows_are_refused"),
    ("_transforms/loops.py", " or len(result) != 2:", ":", LOOPS + "wrong_bodies_bounds_and_rows_are_refused"),
    ("_transforms/loops.py", "limit.ndim == 0 and ", "", LOOPS + "wrong_bodies_bounds_and_rows_are_refused"),
    ("_transforms/loops.py", " is not None:\n        raise UnevenReplicasError", " is True:\n        raise UnevenReplicasError",
     LOOPS + "rows_of_different_numbers_show_no_padding"),
    ("_transforms/gradients.py", "list(bindings.written)", "[]", GRADIENTS + "what_the_loss_writes_is_kept"),
    ("_transforms/gradients.py", "return (gradients, value[1]) if has_aux else gradients", "return gradients",
     GRADIENTS + "aux_may_be_anything"),
    ("_transforms/gradients.py", "if any(leaf is other for other in leaves[:position]):", "if False:",
     GRADIENTS + "wrong_losses_and_variables_are_refused"),
    ("_transforms/gradients.py", "        _refuse_copies(leaves)", "        pass",
     GRADIENTS + "wrong_losses_and_variables_are_refused"),
    ("_transforms/gradients.py", "return jnp.sum(loss) / loss.shape[0]", "return jnp.mean(loss) / 2",
     "tests/test_losses.py::test_losses_of_examples_outside_of_a_step_and_in_default_context"),
    ("_transforms/function.py", "if mesh != meshes[0]:", "if False:", FUNCTION + "two_strategies_in_one_function_are_refused"),
    ("_transforms/function.py", "else [frame.strategy]\n", "else []\n",
     FUNCTION + "a_new_strategy_with_the_address_of_a_dead_one_gets_its_own_program"),
]  # fmt: skip
