"""A field's JSON schema as short text."""

from typing import Any

_TECHNICAL_MAXIMA = {2**31 - 1, 2**32 - 1, 2**63 - 1}  # the widths of integers; not limits of the API
_TECHNICAL_MINIMA = {-(2**31), -(2**63)}


def schema_text(schema: dict[str, Any]) -> str:
    """Type and range, such as 'integer, 1 or more'. Null is left out: it counts as absent."""
    forms = [form for form in _forms(schema) if form.get("type") != "null"]
    return " or ".join(dict.fromkeys(map(_form_text, forms)))


def _forms(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a union, and of the unions in it."""
    branches = schema.get("anyOf") or schema.get("oneOf")
    return [form for branch in branches for form in _forms(branch)] if branches else [schema]


def _form_text(form: dict[str, Any]) -> str:
    if "$ref" in form:
        return "object"
    if "enum" in form or "const" in form:
        return ", ".join(f"`{value}`" for value in form.get("enum", [form.get("const")]))
    kind = str(form["type"])
    if kind == "array":
        return "list of " + _many(schema_text(form["items"]))
    if kind == "object":
        members = form.get("additionalProperties", True)
        return "object of " + _many(schema_text(members)) if isinstance(members, dict) else "object"
    return kind + _range_text(form)


def _many(text: str) -> str:
    """'integer, 0 or more' becomes 'integers (0 or more)', 'list of …' becomes 'lists of …'."""
    kind, space, rest = text.partition(" ")
    return f"{kind[:-1]}s ({rest})" if kind.endswith(",") else f"{kind}s{space}{rest}"


def _range_text(form: dict[str, Any]) -> str:
    if "maxLength" in form:
        return f", {form.get('minLength', 0)} to {form['maxLength']} characters"
    low, above, high = form.get("minimum"), form.get("exclusiveMinimum"), form.get("maximum")
    low = None if low in _TECHNICAL_MINIMA else low
    high = None if high in _TECHNICAL_MAXIMA else high
    if above is not None:
        return f", above {above:g}" + (f", at most {high:g}" if high is not None else "")
    if low is not None and high is not None:
        return f", {low:g} to {high:g}"
    return f", {low:g} or more" if low is not None else ""
