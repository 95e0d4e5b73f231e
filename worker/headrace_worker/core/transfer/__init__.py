"""KV blocks that are transferred between replicas, at the request of the one that will use them. Pure."""
