"""Keeps the replicas as the spec wants them, and tells routers who serves."""
