"""The replica's gRPC server: streams to routers, model facts, cache events, health."""
