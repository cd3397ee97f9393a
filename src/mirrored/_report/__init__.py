"""What a run was: a page for people, and a profile of its steps."""
