"""What every process of a cluster shares besides the contract: errors, logs, addresses, secrets and TLS files."""
