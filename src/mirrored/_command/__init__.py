"""The parts of the command `mirrored`: one attempt of a launch, its restarts, `mirrored check`, `mirrored env`."""
