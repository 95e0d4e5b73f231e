"""When a replica counts as stalled: its step loop has not moved for longer than a long step would explain."""

STALL_SECONDS = 2.0
STALL_STEPS = 4.0
LONGEST_STALL = 20.0  # seconds: a prediction that grew with slow steps does not hide a stall


def stall_limit(predicted_step_seconds: float, at_least: float = STALL_SECONDS) -> float:
    """Seconds without a step after which a replica is stalled, from the time that it predicts for the next one."""
    return max(at_least, min(STALL_STEPS * predicted_step_seconds, LONGEST_STALL))
