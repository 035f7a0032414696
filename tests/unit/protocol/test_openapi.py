from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any, ClassVar

import msgspec
import pytest

from api.app import HEALTH, OPEN_PATHS, ROUTES
from tokservice.protocol import requests
from tokservice.protocol.api_pages import api_pages
from tokservice.protocol.openapi import OPERATIONS, document
from tokservice.protocol.reading import neutral_fields

DOCUMENT = document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if "$ref" in value else set()
        return found.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_the_document_and_the_routes_name_the_same_paths() -> None:
    posts = {path for path, item in DOCUMENT["paths"].items() if item.keys() == {"post"}}
    gets = {path for path, item in DOCUMENT["paths"].items() if item.keys() == {"get"}}
    assert posts == ROUTES.keys()
    assert posts | gets == DOCUMENT["paths"].keys()
    assert {path for path in gets if DOCUMENT["paths"][path]["get"].get("security") == []} == OPEN_PATHS
    assert HEALTH in gets


def test_every_reference_leads_somewhere_and_every_id_is_unique() -> None:
    for ref in refs(DOCUMENT):
        place: Any = DOCUMENT
        for step in ref.removeprefix("#/").split("/"):
            place = place[step]
    used = {ref.rpartition("/")[2] for ref in refs(DOCUMENT)}
    assert used == SCHEMAS.keys(), "no schema is left over"
    ids = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)


@pytest.mark.parametrize("body", [operation.body for operation in OPERATIONS if operation.body], ids=str)
def test_a_body_is_described_by_what_reads_it(body: type[msgspec.Struct]) -> None:
    schema = SCHEMAS[body.__name__]
    fields = msgspec.structs.fields(body)
    assert list(schema["properties"]) == [field.encode_name for field in fields]
    assert set(schema["required"]) == {field.encode_name for field in fields if field.required}
    assert schema["additionalProperties"] is False
    for name, neutral in neutral_fields(body).items():
        assert schema["properties"][name]["enum"] == list(neutral)


def test_parts_that_are_read_by_hand_are_described() -> None:
    parts = SCHEMAS["Message"]["properties"]["content"]["anyOf"][1]
    assert parts == {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}}
    assert set(SCHEMAS["TextPart"]["required"]) == {"text", "type"}
    assert set(SCHEMAS["MessageItem"]["required"]) == {"role", "content"}


@pytest.mark.parametrize(
    "operation", [operation for operation in OPERATIONS if operation.body], ids=lambda one: one.path
)
def test_examples_are_read_by_the_types(operation: Any) -> None:
    assert operation.examples
    for example in operation.examples.values():
        msgspec.json.decode(json.dumps(example), type=operation.body)
    assert isinstance(operation.body, type)
    assert operation.body.__module__ == requests.__name__ or operation.body.__module__.startswith(
        "tokservice.protocol."
    )


def test_the_pages_need_no_network_and_all_links_lead_somewhere() -> None:
    description, docs = api_pages("1.2.3")
    assert json.loads(description.frames[0]) == json.loads(json.dumps(DOCUMENT))
    text = docs.frames[0].decode()
    assert not re.search(r"(src|href)=\"?(https?:)?//|@import|url\(|<script", text)

    class Links(HTMLParser):
        ids: ClassVar[set[str]] = set()
        targets: ClassVar[set[str]] = set()

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            values = dict(attributes)
            self.ids.add(values.get("id") or "")
            if tag == "a":
                self.targets.add(values["href"] or "")

    links = Links()
    links.feed(text)
    assert {target for target in links.targets if not target.startswith("#")} == {"openapi.json"}
    assert {target[1:] for target in links.targets if target.startswith("#")} <= links.ids
    assert SCHEMAS.keys() <= links.ids
    for path in DOCUMENT["paths"]:
        assert path in text
