"""What survives: checkpoints and preemption."""
