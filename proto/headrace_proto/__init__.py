"""The contract between Headrace's planes: gRPC services, the block hash, the cluster's secret, the base of errors."""

CONTRACT_VERSION = 1
