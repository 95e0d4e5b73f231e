"""An attempt that runs alone, since its request was present when replicas were lost."""

TRIAL_TOKENS = 16  # new ones, after which others may run beside it
WHOLE_ANSWER = 0xFFFF_FFFF  # instead of TRIAL_TOKENS: others may run beside it when it has ended
RESERVED_SECONDS = 4.0  # since a router reserved a replica for such an attempt, if it does not ask again
TRIAL_SECONDS = 120.0  # after which others may run beside it in any case
