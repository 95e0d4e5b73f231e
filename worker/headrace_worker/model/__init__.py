"""From a model source to a ready module: files, weights, attention, changes from outside."""
