"""The fields of a request: honoured, accepted at some values, or refused. One table for the check and the docs."""
