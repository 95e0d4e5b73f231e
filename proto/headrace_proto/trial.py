"""An attempt that runs alone, since its request was present when replicas were lost (docs/reliability.md I25)."""

TRIAL_TOKENS = 16  # new ones, after which others may run beside it
