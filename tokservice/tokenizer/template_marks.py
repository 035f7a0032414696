"""The texts that a chat template itself writes, found in its syntax tree. Tokenizer worker, at start-up; pure.

What a template writes comes from its plain text and from its string constants. A constant that is only looked for, as
in ``'</think>' in content`` or ``content.split('</think>')``, is not written, and must stay what it is.
"""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes

# Methods of strings whose arguments are looked for, and functions whose arguments never reach the prompt.
_STRIPPING = {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace"}
_SPLITTING = {"split", "rsplit", "partition", "rpartition"}
_FINDING = {"find", "rfind", "index", "rindex", "count", "startswith", "endswith", "get"}
_LOOKING = _STRIPPING | _SPLITTING | _FINDING
_SILENT = frozenset({"raise_exception", "strftime_now", "range"})
_WRITING_FILTERS = frozenset({"d", "default", "indent", "join"})  # whose arguments may reach the prompt


def written(template: nodes.Template) -> list[str]:
    """All texts that the template may write."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    rewrite(template, note)
    return texts


def rewrite(node: nodes.Node, change: Callable[[str], str]) -> None:
    """Replace each text that the template may write by ``change(text)``, in place."""
    match node:
        case nodes.TemplateData():
            node.data = change(node.data)
        case nodes.Const(value=str(text)):
            node.value = change(text)
        case nodes.Compare() | nodes.Test() | nodes.Slice():
            return
        case nodes.Getattr() | nodes.Getitem():
            rewrite(node.node, change)
        case nodes.Pair():
            rewrite(node.value, change)
        case nodes.Call(node=nodes.Getattr(attr=name) as method) if name in _LOOKING:
            rewrite(method, change)
        case nodes.Call(node=nodes.Name(name=name)) if name in _SILENT:
            return
        case nodes.Filter(name=name) if name not in _WRITING_FILTERS:
            if node.node is not None:
                rewrite(node.node, change)
        case nodes.If() | nodes.CondExpr() | nodes.For():
            for child in node.iter_child_nodes(exclude=("test",)):
                rewrite(child, change)
        case _:
            for child in node.iter_child_nodes():
                rewrite(child, change)
