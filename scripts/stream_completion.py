"""Stream an answer to the terminal, as it is generated; the smallest useful client. Standard library alone.

    python scripts/stream_completion.py "What is the capital of France?"

Ends with the time to the first token (TTFT) and the tokens per second after it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def main() -> int:
    """Run the command; returns the exit code: 0 after a whole answer."""
    arguments = _parse()
    try:
        model = arguments.model or _get(arguments, "/v1/models")["data"][0]["id"]
        _stream(arguments, model)
    except urllib.error.HTTPError as error:  # the body says what is wrong
        print(f"HTTP {error.code}: {_message(error.read())}", file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(f"cannot reach {arguments.url}: {error.reason}", file=sys.stderr)
        return 1
    except (OSError, http.client.HTTPException, RuntimeError) as error:
        print(f"\nthe answer broke off: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # closing the connection is enough: the server stops the work
        return 130
    return 0


def _stream(arguments: argparse.Namespace, model: str) -> None:
    """Print the text as it comes, then the figures."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if arguments.max_tokens:
        body["max_tokens"] = arguments.max_tokens
    if arguments.temperature is not None:
        body["temperature"] = arguments.temperature
    if arguments.completion:
        path, body["prompt"] = "/v1/completions", arguments.prompt
    else:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": arguments.prompt}]

    start_s = time.perf_counter()
    first_s = 0.0
    usage = None
    for event in _events(arguments, path, body):
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["text"] if arguments.completion else choice["delta"].get("content")
            if text:
                first_s = first_s or time.perf_counter()
                print(text, end="", flush=True)
    end_s = time.perf_counter()
    print()
    num_tokens = usage["completion_tokens"] if usage else 0
    if first_s and num_tokens:
        rate = f"{(num_tokens - 1) / (end_s - first_s):.1f} tokens/s" if num_tokens > 1 else "1 token"
        print(f"[{num_tokens} tokens, TTFT {(first_s - start_s) * 1000:.0f} ms, {rate}]", file=sys.stderr)


def _events(arguments: argparse.Namespace, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of an answer: lines ``data: {...}``, and at the end ``data: [DONE]``."""
    with urllib.request.urlopen(_request(arguments, path, json.dumps(body).encode())) as response:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)
    raise RuntimeError("the connection was closed before the end")


def _get(arguments: argparse.Namespace, path: str) -> Any:
    with urllib.request.urlopen(_request(arguments, path)) as response:
        return json.load(response)


def _request(arguments: argparse.Namespace, path: str, body: bytes | None = None) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    if arguments.api_key:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    return urllib.request.Request(arguments.url.rstrip("/") + path, body, headers)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stream an answer to the terminal.")
    parser.add_argument("prompt")
    parser.add_argument("--completion", action="store_true", help="continue the prompt as it is, without a chat")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", default="", help="default: the first that the server names")
    parser.add_argument("--max-tokens", type=int, default=0, help="default: the server's")
    parser.add_argument("--temperature", type=float, help="default: the model's; 0 is greedy")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
