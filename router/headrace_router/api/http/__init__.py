"""The HTTP API of the router: OpenAI's API, on FastAPI."""
