"""Tool calls of Hermes, Qwen and many others: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Detokenizer worker; pure.
"""

from __future__ import annotations

from tokservice.detokenizer.tool_parsers.parser import ToolParser


class HermesParser(ToolParser):
    """One object for each mark."""

    mark = "<tool_call>"
    closing = "</tool_call>"
