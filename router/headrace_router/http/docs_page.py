"""The page at /docs: renders the OpenAPI document with a script of ours, and loads nothing from anywhere."""

import base64
import hashlib
import json
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #0a7; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 small { font-weight: normal; font-size: 1rem; opacity: .7; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
code, .method { font-family: ui-monospace, monospace; }
.method { display: inline-block; min-width: 3.5rem; color: var(--accent); text-transform: uppercase; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: .9rem; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top; }
tr:hover { background: var(--soft); }
"""

_SCRIPT = """
const api = JSON.parse(document.getElementById("api").textContent);
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  node.textContent = text;
  parent.append(node);
  return node;
};
const resolve = schema => schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
const type = schema => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const forms = schema.anyOf || schema.oneOf;
  if (forms) return forms.map(type).filter(name => name !== "null").join(" | ");
  if (schema.enum || schema.const) return (schema.enum || [schema.const]).map(v => JSON.stringify(v)).join(" | ");
  if (schema.type === "array") return "list of " + type(schema.items || {});
  return schema.type || "any";
};
const range = schema => {
  const forms = [schema, ...(schema.anyOf || [])];
  const find = key => forms.map(form => form[key]).find(value => value !== undefined);
  const rules = [["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"],
    ["minItems", "items, at least"], ["maxLength", "characters, at most"]];
  return rules.filter(([key]) => find(key) !== undefined).map(([key, words]) => words + " " + find(key)).join(", ");
};
const table = (schema, parent) => {
  const grid = make("table", "", parent);
  const head = make("tr", "", grid);
  ["field", "type", "range", ""].forEach(title => make("th", title, head));
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = make("tr", "", grid);
    make("code", name + (required.has(name) ? " *" : ""), make("td", "", row));
    make("td", type(field), row);
    make("td", range(field), row);
    make("td", field.description || "", row);
  }
};
document.title = api.info.title;
const title = make("h1", api.info.title + " ", document.body);
make("small", api.info.version, title);
make("p", api.info.description || "", document.body);
for (const [path, methods] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const box = make("details", "", document.body);
    const line = make("summary", "", box);
    make("span", method, line).className = "method";
    make("code", " " + path + "  ", line);
    make("span", operation.summary || "", line);
    const body = operation.requestBody && operation.requestBody.content["application/json"].schema;
    if (body) table(resolve(body), box);
    else make("p", "No body.", box);
  }
}
make("h2", "Objects", document.body);
for (const [name, schema] of Object.entries(api.components.schemas)) {
  const box = make("details", "", document.body);
  make("code", name, make("summary", "", box));
  table(schema, box);
}
"""


def _source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def docs_page(document: dict[str, Any]) -> str:
    """The whole page, with the OpenAPI document inside."""
    data = json.dumps(document).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>API</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body>"
        f'<script id="api" type="application/json">{data}</script><script>{_SCRIPT}</script></body></html>'
    )
