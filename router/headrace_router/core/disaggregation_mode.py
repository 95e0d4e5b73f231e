"""Which replicas compute prompts, and which answer: as an operator sets it."""

from typing import Literal

Mode = Literal["auto", "shared", "always", "off"]
"""`auto` compares predicted seconds for each request; `shared` does, and prefill replicas may answer, too."""
