"""Damages to the update that replicas share out."""

_OUT = "tests/_updates/test_shared_out.py::test_"
_SENDS = _OUT + "what_an_update_sends"
_REFUSED = _OUT + "what_differs_by_replica_is_refused_before_it_is_gathered"
_SAME = _OUT + "the_numbers_are_those_without_shards"

MUTANTS = [
    ("_updates/partwise.py", "= value, self._same(value)", "= value, value", _REFUSED),
    ("_updates/partwise.py", "jnp.where(is_real, value.array, jnp.zeros_like(value.array))", "value.array + 1", _SAME),
    ("_updates/partwise.py", "jnp.where(self.axis.index() == 0, whole, jnp.zeros_like(whole))", "whole", _SAME),
    ("_updates/partwise.py", "isinstance(v, jax.sharding.Sharding) for v", "True for v", _SENDS),
    ("_updates/shared_out.py", "names.get(id(value), unknown)", "unknown", _REFUSED),
    ("_updates/shared_out.py", "return ShardedVariable(value, name=name) if is_divided else ", "return ",
     _OUT + "each_replica_holds_its_part_of_the_state"),
    ("_checkpoint/state.py", "join_parts(host[entries[path][\"value\"]], leaf.shape)", "host[entries[path][\"value\"]]",
     _OUT + "a_checkpoint_restores_into_the_other_kind_on_another_number_of_replicas"),
]  # fmt: skip
