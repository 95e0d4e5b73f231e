"""Step execution over several ranks: commands, stages, recording."""
