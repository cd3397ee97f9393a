"""How models of other libraries keep their state in variables of ours, and train on every replica."""
