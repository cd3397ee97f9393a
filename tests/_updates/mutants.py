"""Damages to the update that replicas share out."""

_OUT = "tests/_updates/test_shared_out.py::test_"

MUTANTS = [
    ("_updates/partwise.py", "self._once(value, self._same) if", "value if",
     _OUT + "what_differs_by_replica_is_refused_before_it_is_gathered"),
    ("_updates/partwise.py", "jnp.where(is_real, value.array, jnp.zeros_like(value.array))", "value.array + 1",
     _OUT + "the_numbers_are_those_without_shards"),
]  # fmt: skip
