"""Checkpoints and preemption: state that outlives a program."""
