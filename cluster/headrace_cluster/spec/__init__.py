"""The cluster spec, and its sources: flags, environment variables, file."""
