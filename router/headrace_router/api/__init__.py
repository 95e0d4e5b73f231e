"""The router's public APIs: HTTP, gRPC, and their sockets."""
