"""Where batches come from: datasets of several libraries, and their positions."""
