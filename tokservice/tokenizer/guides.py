"""Structured output: what a request asks for as one guide for the engine, checked. Tokenizer worker; pure.

A guide is a kind and a text: "json_schema" (a JSON schema), "regex", "choice" (a JSON array of strings), "grammar"
(Lark as llguidance reads it; GBNF is translated). llguidance checks it here without a model, so that a broken one
is a 400; it is imported with the first such request.

Between the parts of JSON a few line ends and an indentation may stand, no more: where a model would rather end, or
say something else, it writes blanks for ever.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, DecimalException
from typing import Any, NamedTuple

import msgspec
import orjson

from tokservice.protocol.guide_fields import STRUCTURED_OUTPUTS_NEUTRAL, ResponseFormat, StructuredOutputs
from tokservice.protocol.reading import NULL, refuse_unsupported
from tokservice.protocol.requests import GenerationBody, Sampling
from tokservice.tokenizer.json_guard import check_depth
from tokservice.wire.errors import RequestError

BLANKS = r"[ \t]{1,80}|(\r?\n){1,2}[ \t]{0,80}"
FEW_BLANKS = f'{{"x-guidance":{json.dumps({"whitespace_pattern": BLANKS})}'  # a schema's beginning, less its comma
ANY_OBJECT = FEW_BLANKS + ',"type":"object"}'
ANSWER = "response_format"  # the field whose guide is for what the model says, and not for its calls of tools
MAX_GUIDE_BYTES = 32 * 1024
MAX_GRAMMAR_SYMBOLS = 10_000  # a short schema can stand for a huge grammar; so many take some 0.1 s to compile
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 1024
MASK_LEXER_FUEL = 20_000  # bounds the work for the one mask that is made here
MAX_MULTIPLE = 100_000  # divisibility takes as many states, which nothing else bounds: so many cost some 0.4 s
MAX_DECIMALS = 10

_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+.0-9eE]+)')
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


class Guide(NamedTuple):
    """What the output must follow."""

    kind: str  # as in SamplingParams.guide_kind
    text: str
    param: str  # the field that asked for it


def guide_of(body: Sampling) -> Guide | None:
    """The guide that a body asks for, checked; None: none. Raises RequestError (400)."""
    found = _guided_fields(body)
    if body.structured_outputs is not None:
        found += _structured_outputs(body.structured_outputs)
    if isinstance(body, GenerationBody) and body.response_format is not None:
        found += _response_format(body.response_format)
    if len(found) > 1:
        raise _invalid(f"'{found[0].param}' and '{found[1].param}' exclude each other.", found[1].param)
    return checked(found[0]) if found else None


def checked(guide: Guide) -> Guide:
    """The guide in the form that the engine takes. Raises RequestError (400)."""
    if len(guide.text.encode()) > MAX_GUIDE_BYTES:
        raise _invalid(f"'{guide.param}' may have at most {MAX_GUIDE_BYTES} bytes.", guide.param)
    if _common_multiple(guide.text) > MAX_MULTIPLE:
        message = f"the least common multiple of all 'multipleOf' must have no more digits than {MAX_MULTIPLE}."
        raise _invalid(f"Invalid '{guide.param}': {message}", guide.param)
    import llguidance

    try:
        grammar, text = _compiled(llguidance, guide)
        limits = llguidance.LLParserLimits(max_grammar_size=MAX_GRAMMAR_SYMBOLS, verbose_errors=False)
        fault = llguidance.LLMatcher.validate_grammar(grammar, None, limits=limits)
        if not fault and _leads_nowhere(llguidance, grammar):
            fault = "no output can follow it."
    except Exception as error:  # the library raises whatever its parsers raise
        fault, text = str(error), ""
    if fault:
        raise _invalid(f"Invalid '{guide.param}': {fault[:300]}", guide.param)
    return guide._replace(text=text)


def _common_multiple(text: str) -> int:
    """The least one of all ``multipleOf`` in a schema, or in those of a grammar, as its digits without a point.

    The numbers need not meet in one place of the schema: that they do is hard to exclude.
    """
    text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text)
    try:
        values = [abs(Decimal(number)).normalize() for number in _MULTIPLE_OF.findall(text)]
    except DecimalException:
        return MAX_MULTIPLE + 1
    if any(abs(value.adjusted()) > MAX_DECIMALS for value in values):
        return MAX_MULTIPLE + 1
    multiple = math.lcm(*[int(value.scaleb(MAX_DECIMALS)) for value in values if value])
    for _ in range(MAX_DECIMALS):
        if multiple % 10:
            break
        multiple //= 10
    return multiple


def _leads_nowhere(llguidance: Any, grammar: str) -> bool:
    """Whether a grammar that is well formed has no first byte, nor an end: found with a tokenizer of single bytes.

    A grammar that names tokens of the model's own is left to the engine, which has them.
    """
    limits = llguidance.LLParserLimits(step_lexer_fuel=MASK_LEXER_FUEL, verbose_errors=False)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return False
    matcher.compute_bitmask()
    return bool(matcher.is_error())


def _compiled(llguidance: Any, guide: Guide) -> tuple[str, str]:
    """llguidance's form of a guide, to be checked, and the text for the engine."""
    matcher = llguidance.LLMatcher
    match guide.kind:
        case "json_schema":
            return matcher.grammar_from_json_schema(guide.text), guide.text
        case "regex":
            return matcher.grammar_from_regex(guide.text), guide.text
        case "choice":
            return llguidance.grammar_from("choice", guide.text), guide.text
    text = llguidance.gbnf_to_lark.any_to_lark(guide.text) if "::=" in guide.text else guide.text
    return matcher.grammar_from_lark(text), text


def _guided_fields(body: Sampling) -> list[Guide]:
    found = []
    if body.guided_json is not NULL and (schema := _schema(body.guided_json, "guided_json")):
        found.append(Guide("json_schema", schema, "guided_json"))
    if body.guided_regex is not None:
        found.append(Guide("regex", body.guided_regex, "guided_regex"))
    if body.guided_choice is not None:
        found.append(_choice(body.guided_choice, "guided_choice"))
    if body.guided_grammar is not None:
        found.append(Guide("grammar", body.guided_grammar, "guided_grammar"))
    return found


def _structured_outputs(asked: StructuredOutputs) -> list[Guide]:
    param = "structured_outputs"
    refuse_unsupported(asked, STRUCTURED_OUTPUTS_NEUTRAL, param=param)
    found = []
    if asked.json is not NULL and (schema := _schema(asked.json, param)):
        found.append(Guide("json_schema", schema, param))
    if asked.json_object:
        found.append(Guide("json_schema", ANY_OBJECT, param))
    if asked.regex is not None:
        found.append(Guide("regex", asked.regex, param))
    if asked.choice is not None:
        found.append(_choice(asked.choice, param))
    if asked.grammar is not None:
        found.append(Guide("grammar", asked.grammar, param))
    if len(found) != 1:
        raise _invalid("'structured_outputs' needs exactly one of json, json_object, regex, choice and grammar.", param)
    return found


def _response_format(asked: ResponseFormat) -> list[Guide]:
    param = ANSWER
    if (asked.type == "json_schema") != (asked.json_schema is not None):
        raise _invalid("'response_format' has a 'json_schema' exactly if its type is json_schema.", param)
    if asked.type == "json_object":
        return [Guide("json_schema", ANY_OBJECT, param)]
    if asked.json_schema is None:
        return []
    schema = _schema(asked.json_schema.schema, param)
    if not schema:
        raise _invalid("'response_format.json_schema' needs a 'schema'.", param)
    return [Guide("json_schema", schema, param)]


def _schema(raw: msgspec.Raw, param: str) -> str:
    """A JSON schema, written as an object or as a string that holds one; '' for null."""
    if len(bytes(raw)) > 2 * MAX_GUIDE_BYTES:
        raise _invalid(f"'{param}' may have at most {MAX_GUIDE_BYTES} bytes.", param)
    try:
        value = msgspec.json.decode(raw)
        if value is None:
            return ""
        text = value if isinstance(value, str) else bytes(raw).decode()
        check_depth(text.encode(), MAX_SCHEMA_DEPTH, param=param)
        schema = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _invalid(f"'{param}' must be a JSON object: {error}", param) from error
    rest = text.lstrip()[1:]
    return FEW_BLANKS + "," * bool(schema) + rest  # what the client says of blanks comes later, and so counts


def _choice(choices: list[str], param: str) -> Guide:
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        raise _invalid(f"'{param}' must hold 1 to {MAX_CHOICES} strings, none of them empty.", param)
    return Guide("choice", orjson.dumps(choices).decode(), param)


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
