"""Divides the update of variables among the replicas."""
