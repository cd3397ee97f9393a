"""How models of other libraries take part in a step. None of these libraries is imported here: who uses one has imported it."""
