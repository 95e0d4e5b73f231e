"""Tensor operations of Headrace: each op has a torch reference, and faster backends where they pay."""
