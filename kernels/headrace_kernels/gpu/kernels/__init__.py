"""Triton code. No types except ``tl.constexpr``: Triton compiles these functions' source, Python never calls them."""
