"""The strategies and their verbs."""
