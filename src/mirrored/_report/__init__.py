"""Shows a run: a page for people, and a profile of its steps."""
