"""Communication between ranks: rendezvous, process groups, shared memory, failure detection."""
