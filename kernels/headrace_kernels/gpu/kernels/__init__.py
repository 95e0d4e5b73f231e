"""Triton code. No types beyond ``tl.constexpr``: Triton reads these functions' source, Python never calls them."""
