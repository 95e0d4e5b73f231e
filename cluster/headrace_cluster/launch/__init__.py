"""Start and stop of a cluster: checks, router processes, controller monitor, terminal display."""
