"""What workers tell each other, and how a job that is stuck ends."""
