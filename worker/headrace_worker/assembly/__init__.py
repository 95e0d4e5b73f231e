"""Assembly of an engine, the way its steps run, and the loop that drives it."""
