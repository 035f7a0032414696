"""On the path of a started process: at its end it writes down which modules it had loaded."""

import atexit
import os
import sys
from pathlib import Path


def _dump() -> None:
    role = " ".join(sys.orig_argv)
    (Path(os.environ["DUMP_MODULES_TO"]) / f"{os.getpid()}").write_text("\n".join([role, *sorted(sys.modules)]))


if "DUMP_MODULES_TO" in os.environ:
    atexit.register(_dump)
