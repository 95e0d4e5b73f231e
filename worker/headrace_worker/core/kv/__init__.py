"""Bookkeeping of the paged KV cache: pure Python over integers."""
