"""Keeps the replicas as the spec describes them, and publishes the member list to routers."""
