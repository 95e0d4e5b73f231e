"""From a model source to a ready module: where it comes from, its weights, its attention, its changes from outside."""
