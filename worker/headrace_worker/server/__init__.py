"""The replica's gRPC face: streams to routers, model facts, cache events, health."""
