"""pydantic's messages in plain words: for flags, environment variables and files alike."""

import re

_TABLE = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r", (unable to|got a) .*$", ""),
        (r"^Value error, ", ""),
        (r"^Input should be a valid integer", "it must be a whole number"),
        (r"^Input should be a (valid|finite) number", "it must be a number"),
        (r"^Input should be a valid boolean", "it must be true or false"),
        (r"^Input should be a valid string", "it must be text"),
        (r"^Input is not a valid path.*", "it must be a path"),
        (r"^Input should be a valid (tuple|list)", "it must be a list"),
        (r"^Input should be a valid dictionary.*", "it must hold keys and values"),
        (r"^(Tuple|List) should have at least 1 item .*", "it must have an entry"),
        (r"^(Tuple|List) should have at (least|most) (\d+) items? .*", r"it must have at \2 \3 entries"),
        (r"^String should have at least 1 character", "it must not be empty"),
        (r"^String should have at (least|most) (\d+) characters?", r"it must have at \1 \2 characters"),
        (r"^String should match pattern .*", "its length or one of its characters is not allowed"),
        (r"^Input should be greater than or equal to", "it must be at least"),
        (r"^Input should be less than or equal to", "it must be at most"),
        (r"^Input should be greater than", "it must be above"),
        (r"^Input should be less than", "it must be below"),
        (r"^Input should be", "it must be"),
    )
)
EXAMPLES = {
    "models": "[{source: smollm2}]",
    "prefill": "{replicas: 1}",
    "decode": "{replicas: 2}",
    "defaults": "{max_tokens: 512}",
    "aliases": "[tiny]",
    "routers": "{port: 8000}",
    "auth": "{keys_file: keys.txt}",
    "keys": "[a-long-secret]",
    "tls": "{cert: cert.pem, key: key.pem}",
    "limits": "{messages: 64}",
    "admin": "{port: 8002}",
    "control": "{port: 8004}",
    "internal": "{tls: {cert: tls.crt, key: tls.key, ca: ca.crt}}",
    "health": "{interval_seconds: 1}",
    "ray": "{dashboard: false}",
    "logs": "{format: json}",
}
"""How a section or a list is written in a file, by its key."""


def plain(message: str) -> str:
    """One message of pydantic, as the end of a sentence that begins with the name of the value."""
    for pattern, words in _TABLE:
        message = pattern.sub(words, message)
    return message[:1].lower() + message[1:]
