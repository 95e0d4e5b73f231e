"""The HTTP side of the router: OpenAI's API over FastAPI."""
