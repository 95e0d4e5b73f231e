"""The control plane on Ray, and the command line."""
