from __future__ import annotations

import pytest

from tokservice.tokenizer.reasoning import reasoning_of, thinking_variables, with_effort
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError

KNOWS = Traits(frozenset({"reasoning_effort", "enable_thinking", "thinking"}), tells_thoughts=True)
SWITCH = Traits(frozenset({"enable_thinking"}), tells_thoughts=True)


@pytest.mark.parametrize(
    ("prompt", "begun", "expected"),
    [
        ("x", "", "tagged"),
        ("x<think>\n", "", "open"),
        ("x<think>\n", "<think>\n", "open"),
        ("x<think>so", "<think>so", "inside"),
        ("x<think>so</think>yes", "<think>so</think>yes", "tagged"),
        ("what is <think>? yes", "yes", "tagged"),
    ],
)
def test_thoughts_that_a_client_has_begun_go_on(prompt: str, begun: str, expected: str) -> None:
    """The rest of them, and their closing tag, came as the answer's text: of the kind of dynamo#13841."""
    assert reasoning_of("think", prompt, begun, is_guided=False) == expected
    assert reasoning_of("", prompt, begun, is_guided=False) == ""
    assert (reasoning_of("think", prompt, begun, is_guided=True) == "") is (expected != "tagged")


def test_thoughts_are_turned_on_and_off_by_the_names_that_the_template_reads() -> None:
    assert thinking_variables(KNOWS, thinks=True) == {"enable_thinking": True, "thinking": True}
    assert thinking_variables(SWITCH, thinks=False) == {"enable_thinking": False}
    assert thinking_variables(Traits(), thinks=False) == {}


def test_an_effort_joins_the_other_variables() -> None:
    assert with_effort({"a": 1}, None, Traits(), param="x") == {"a": 1}
    reads = Traits(frozenset({"reasoning_effort"}))
    assert with_effort({"a": 1}, "low", reads, param="x") == {"a": 1, "reasoning_effort": "low"}
    none = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert with_effort(None, "none", KNOWS, param="x") == none
    assert with_effort(None, "none", SWITCH, param="x") == {"enable_thinking": False}


def test_an_effort_turns_thoughts_on() -> None:
    """Templates that are silent unless told to think, as Gemma 4's, took no effort: vllm#43395."""
    thinks = {"enable_thinking": True, "thinking": True}
    assert with_effort(None, "low", KNOWS, param="x") == thinks | {"reasoning_effort": "low"}
    assert with_effort(None, "high", SWITCH, param="x") == {"enable_thinking": True}
    assert with_effort({"enable_thinking": False}, "high", SWITCH, param="x") == {"enable_thinking": False}


UNTOLD = Traits(SWITCH.variables, tells_thoughts=False)


@pytest.mark.parametrize(("effort", "traits"), [("low", UNTOLD), ("low", Traits()), ("none", Traits())])
def test_an_effort_that_the_model_does_not_know_is_refused(effort: str, traits: Traits) -> None:
    with pytest.raises(RequestError, match=effort) as caught:
        with_effort(None, effort, traits, param="reasoning_effort")
    assert (caught.value.status, caught.value.param) == (400, "reasoning_effort")
