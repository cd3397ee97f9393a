"""Damages to what we know of JAX."""

_HERE = "tests/_jax/test_{}.py::test_{}"

MUTANTS = [
    ("_jax/random_keys.py", "(low < first)", "(low < low)",
     _HERE.format("random_keys", "jax_numbers_elements_as_keys_by_rows_do")),
    ("_jax/jaxprs.py", "return any(map(is_collective, (equation, *inside(equation))))", "return is_collective(equation)",
     _HERE.format("jaxprs", "what_an_equation_depends_on_and_sends")),
    ("_jax/tracing.py", "        renew()\n        yield renew", "        yield renew",
     _HERE.format("tracing", "inner_caches_are_shared_without_and_apart_with_a_token")),
    ("_jax/marks.py", "[tangent] = tangents", "tangent = 2 * tangents[0]",
     _HERE.format("marks", "a_mark_does_not_change_derivatives_or_batches")),
    ("_jax/jaxprs.py", "id(var) in donated and _rank(var)", "id(var) in donated", "tests/_program/test_program.py::"
     "test_what_a_jit_inside_a_step_gets_from_the_step_and_numbers_and_programs_with_callbacks_donate_nothing"),
]  # fmt: skip
