"""The contract between components: gRPC services, the block hash, roles, the rule for stalls."""

CONTRACT_VERSION = 4


def is_compatible(version: int) -> bool:
    """Whether a peer with this version of the contract is served: the same one, the one before or the one after.

    Fields are only ever added, so that such peers serve together while a cluster is updated. 0: the peer sent none.
    """
    return version > 0 and abs(version - CONTRACT_VERSION) <= 1
