"""Training steps compiled for machines that one does not have: topologies, chips, what a program would do there."""
