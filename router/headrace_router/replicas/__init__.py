"""Links to replicas, and the member list that defines the replicas."""
