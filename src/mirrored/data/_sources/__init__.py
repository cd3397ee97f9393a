"""The sources of batches: datasets of several libraries, and their positions."""
