"""Replicas with different numbers of rows in one program."""
