"""From a valid request to its updates: admission, preparation, choices, metrics."""
