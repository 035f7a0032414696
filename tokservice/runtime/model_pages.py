"""The pages about the served model, in the forms of OpenAI's and Anthropic's API, which have the same paths. Launcher;
pure.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def model_pages(name: str, created: int, max_model_len: int | None) -> dict[str, dict[str, Any]]:
    """By path. ``created``: unix seconds; ``max_model_len``: tokens, where it is known."""
    model = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tokservice",
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
    }
    models = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
    return {"/v1/models": models, f"/v1/models/{name}": model}
