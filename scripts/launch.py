"""Start every process of tokservice: the same as ``tokservice serve``.

python scripts/launch.py [--config configs/simulated.toml] [--model DIR] [--port 8000] [--set section.key=value]
"""

from __future__ import annotations

import sys

from tokservice.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
