"""The page at /docs: its script fetches /openapi.json, with an API key where one is needed, and renders it.

The page contains nothing that needs a key and loads nothing from other origins. The tab's session storage has the key.
"""

import base64
import hashlib

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
input, button { font: inherit; padding: .3rem .6rem; border: 1px solid var(--line); border-radius: 6px; }
#forget { float: right; font-size: .9rem; }
"""

_SCRIPT = """
const KEY = "headrace-api-key";
const page = document.getElementById("page");
const ask = document.getElementById("ask");
const field = document.getElementById("key");
const problem = document.getElementById("problem");
const forget = document.getElementById("forget");
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  node.textContent = text;
  parent.append(node);
  return node;
};
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
  const needed = ([name]) => required.has(name) ? 0 : 1;
  for (const [name, field] of Object.entries(schema.properties || {}).sort((a, b) => needed(a) - needed(b))) {
    const row = make("tr", "", grid);
    make("code", name + (required.has(name) ? " *" : ""), make("td", "", row));
    make("td", type(field), row);
    make("td", range(field), row);
    make("td", field.description || "", row);
  }
};
const render = api => {
  const resolve = schema => schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
  page.replaceChildren();
  document.title = api.info.title;
  const title = make("h1", api.info.title + " ", page);
  make("small", api.info.version, title);
  make("p", api.info.description || "", page);
  if (api["x-models"]) {
    make("h2", "Models", page);
    const grid = make("table", "", page);
    const head = make("tr", "", grid);
    ["model", "context", "defaults, where a request's own values win"].forEach(title => make("th", title, head));
    for (const model of api["x-models"]) {
      const row = make("tr", "", grid);
      make("code", model.id, make("td", "", row));
      make("td", model.max_model_len === null ? "" : model.max_model_len + " tokens", row);
      make("td", Object.entries(model.defaults || {}).map(entry => entry.join(" ")).join(", "), row);
    }
  }
  make("h2", "Routes", page);
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const box = make("details", "", page);
      const line = make("summary", "", box);
      make("span", method, line).className = "method";
      make("code", " " + path + "  ", line);
      make("span", operation.summary || "", line);
      const body = operation.requestBody && operation.requestBody.content["application/json"].schema;
      if (body) table(resolve(body), box);
      else make("p", "No body.", box);
    }
  }
  make("h2", "Objects", page);
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const box = make("details", "", page);
    make("code", name, make("summary", "", box));
    table(schema, box);
  }
};
const askFor = message => {
  problem.textContent = message;
  ask.hidden = false;
  field.focus();
};
const load = async key => {
  const headers = key ? {Authorization: "Bearer " + key} : {};
  const answer = await fetch("openapi.json", {headers, cache: "no-store"}).catch(() => null);
  if (answer === null) problem.textContent = "The server did not answer; load this page again.";
  else if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    askFor(key ? "This API key is not valid." : "");
  } else if (!answer.ok) problem.textContent = "The server answered with status " + answer.status + ".";
  else {
    const api = await answer.json();
    if (key) sessionStorage.setItem(KEY, key);
    ask.hidden = true;
    forget.hidden = !key;
    problem.textContent = "";
    render(api);
  }
};
ask.addEventListener("submit", event => {
  event.preventDefault();
  const key = field.value.trim();
  field.value = "";
  if (/^[!-~]{8,512}$/.test(key)) load(key);
  else askFor("An API key has 8 to 512 printable ASCII characters and no spaces.");
});
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
const kept = sessionStorage.getItem(KEY);
if (kept || document.body.dataset.key === "none") load(kept);
else askFor("");
"""


def _source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


DOCS_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_source(_SCRIPT)}; style-src {_source(_STYLE)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def docs_page(*, needs_key: bool) -> str:
    """The whole page. needs_key: whether the API needs a key, so that the page asks for it before the first request."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headrace API</title>'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f'<style>{_STYLE}</style></head><body data-key="{"needed" if needs_key else "none"}">'
        '<button id="forget" hidden>Forget the API key</button>'
        '<form id="ask" hidden><h1>Headrace API</h1><p><label for="key">This server needs an API key: </label>'
        '<input id="key" type="password" autocomplete="off" spellcheck="false" size="40"> '
        "<button>Open the documentation</button></p>"
        "<p>The key stays in this tab, until it is closed, and is sent to this server only.</p></form>"
        '<p id="problem" role="alert"></p><main id="page"></main>'
        "<noscript><p>This page needs JavaScript. The same document is at <code>openapi.json</code>.</p></noscript>"
        f"<script>{_SCRIPT}</script></body></html>"
    )
