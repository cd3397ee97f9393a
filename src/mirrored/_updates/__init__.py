"""How the replicas share out the update of variables."""
