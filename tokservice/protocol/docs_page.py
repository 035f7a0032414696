"""The API's description as a page for people: one HTML text that needs neither network nor script.

The launcher writes it once, from the OpenAPI document.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

STYLE = """\
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 small { font-weight: normal; opacity: .6 }
h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1rem }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { background: #8881; padding: .6rem; overflow-x: auto }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8883 }
.method { text-transform: uppercase; opacity: .6 }
"""


def docs_page(document: dict[str, Any]) -> bytes:
    """The page."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [
        (method, path, operation) for path, item in document["paths"].items() for method, operation in item.items()
    ]
    body = [
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        f"<p>{_prose(info['description'])}</p>",
        '<p>For programs: <a href="openapi.json"><code>/openapi.json</code></a></p>',
        "<ul>",
        *(
            f'<li><a href="#{operation["operationId"]}"><code>{escape(path)}</code></a> {escape(operation["summary"])}'
            for _, path, operation in operations
        ),
        "</ul>",
        *(_operation(method, path, operation) for method, path, operation in operations),
        "<h1>Schemas</h1>",
        *(_schema(name, schema) for name, schema in schemas.items()),
    ]
    head = f'<meta charset="utf-8"><title>{escape(info["title"])}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n{"".join(body)}\n</body></html>\n'.encode()


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    text = [
        f'<h2 id="{operation["operationId"]}"><code><span class="method">{method}</span> {escape(path)}</code></h2>',
        f"<p>{escape(operation['summary'])}</p>",
    ]
    if request := operation.get("requestBody"):
        for kind, content in request["content"].items():
            text.append(f"<p>Body: {_type(content['schema'])} <code>{escape(kind)}</code></p>")
            for name, example in content["examples"].items():
                value = escape(json.dumps(example["value"], indent=1, ensure_ascii=False))
                text.append(f"<details><summary>Example: {escape(name)}</summary><pre>{value}</pre></details>")
    text.append("<table><tr><th>status<th>answer</tr>")
    for status, response in operation["responses"].items():
        text.append(f"<tr><td>{status}<td>{_answers(response)}</tr>")
    text.append("</table>")
    return "".join(text)


def _answers(response: dict[str, Any]) -> str:
    if "$ref" in response:
        return "an error: " + _type(response)
    schemas = {kind: content["schema"] for kind, content in response["content"].items()}
    return "<br>".join(
        f"{_type(schema.get('properties', {}).get('data', schema))} <code>{escape(kind)}</code>"  # of an event its data
        for kind, schema in schemas.items()
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    text = [f'<h2 id="{name}"><code>{name}</code></h2>', f"<p>{_prose(schema.get('description', ''))}</p>"]
    if "properties" not in schema:
        return "".join([*text, f"<p>{_type(schema)}</p>"])
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{'' if field in schema['required'] else '?'}<td>{_type(kind)}"
        f"<td>{_prose(kind.get('description', ''))}</tr>"
        for field, kind in schema["properties"].items()
    )
    return "".join([*text, f"<table>{rows}</table>"])


def _type(schema: dict[str, Any]) -> str:
    """A type in a few words; names of other schemas are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        items = _type(schema.get("items", {}))
        return f"list of ({items})" if " | " in items else f"list of {items}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _prose(text: str) -> str:
    """Text with ``code`` in it."""
    return re.sub(r"``(.+?)``", r"<code>\1</code>", escape(text))
