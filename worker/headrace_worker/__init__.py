"""The inference engine of one replica."""
