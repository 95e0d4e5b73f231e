"""API keys, tenants, and the check of exposed addresses."""
