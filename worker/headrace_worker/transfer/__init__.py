"""KV blocks that go from one replica to another, asked for by the one that will use them."""
