"""Devices, values of many replicas, collectives between them, and the context that a step runs in."""
