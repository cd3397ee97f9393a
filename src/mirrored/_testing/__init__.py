"""Private: see `mirrored.testing`."""
