"""Tools for tests of a training, whose public names are in `mirrored.testing`."""
