"""Validation of request bodies: one validator for HTTP and gRPC."""
