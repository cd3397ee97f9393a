"""Tools to test a training; their public names are in `mirrored.testing`."""
