"""The front door: HTTP and gRPC APIs, admission, tokenization, placement, streaming."""
