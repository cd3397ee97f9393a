"""Devices, values of many replicas, collectives between replicas, and the context in which a step runs."""
