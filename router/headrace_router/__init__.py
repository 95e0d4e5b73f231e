"""The router: HTTP and gRPC APIs, admission, tokenization, placement, streaming."""
