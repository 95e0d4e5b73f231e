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
    ["model", "context", "defaults, which a request's own values override"].forEach(title => make("th", title, head));
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
