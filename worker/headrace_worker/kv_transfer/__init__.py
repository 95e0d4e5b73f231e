"""The data plane of KV transfer: the threads and connections that move blocks between replicas."""
