"""All code that imports Ray: the actors, placement, and the Ray that `serve` starts."""
