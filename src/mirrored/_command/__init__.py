"""The parts of the command `mirrored`."""
