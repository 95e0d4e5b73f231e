"""The gRPC API of the router."""
