"""The contract between components: gRPC services, the block hash, the identities of processes, the base of errors."""

CONTRACT_VERSION = 1
