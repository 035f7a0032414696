"""Put a model on this machine and print its folder: the default model, or the one named (a Hub id).

    python scripts/fetch_model.py [MODEL]

Safe to repeat and to interrupt. Exit code 3, with one line, where it cannot be had.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tokservice.models.resolve import resolve_model
from tokservice.runtime.config import DEFAULT_MODEL
from tokservice.wire.errors import TokserviceError


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch a model and print its folder.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="default: %(default)s")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(resolve_model(arguments.model))
    except TokserviceError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
