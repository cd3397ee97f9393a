"""Damages to the strategies, the losses and the optimizer."""

RIGHT = "tests/test_losses.py::test_every_right_form_is_the_update_of_one_device_in_silence"
STRATEGY = "tests/_strategy/test_strategy.py::test_"

MUTANTS = [
    ("_strategy/leaves.py", " and array.sharding.device_set != self.mesh.mirrored.device_set", "",
     "tests/_replicas/test_mesh.py::test_strategies_on_the_same_devices_are_the_same_place"),
    ("_strategy/leaves.py", "tuple(map(jax.numpy.copy, copies))", "tuple(copies)",
     STRATEGY + "local_results_of_variables_are_their_copies"),
    ("losses.py", "    if num_rows:\n        return _share(_scalar", "    if True:\n        return _share(_scalar",
     RIGHT + "[uneven]"),
    ("losses.py", "replicas.sum([jnp.sum(weights)])[0] if total", "jnp.sum(weights) if total", RIGHT + "[even]"),
    ("optimizer.py", ".mirrored, op, (), None)", ".mirrored, ReduceOp.MEAN, (), None)",
     "tests/test_optimizer.py::test_outside_a_step_gradients_are_one_value_and_per_replica_ones_are_summed"),
    ("optimizer.py", "        self._iterations.assign_add(1)\n", "",
     "tests/test_optimizer.py::test_iterations_count_the_updates_wherever_they_are_made"),
]  # fmt: skip
