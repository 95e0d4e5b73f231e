"""`python -m headrace_router.validation.fields`: prints docs/api.md."""

from headrace_router.validation.fields.api_page import api_page

print(api_page(), end="")
