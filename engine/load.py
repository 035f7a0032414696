"""From configuration and model folder to an engine core.

Engine process. torch is imported here only once the configuration asks for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from engine.core import EngineCore
from engine.model_files import eos_token_ids, vocab_size
from engine.simulated import SimulatedEngine
from tokservice.runtime.config import Config

log = logging.getLogger(__name__)


def build_core(config: Config, model_dir: Path, tell: Callable[[str], None] = log.info) -> EngineCore:
    """The core that the configuration asks for, ready to run. Raises StartupError with one line for the operator.

    ``tell`` hears what takes long.
    """
    if config.engine.kind == "simulated":
        num_ids = vocab_size(model_dir)
        return SimulatedEngine(
            config.engine,
            config.simulated,
            vocab_size=num_ids,
            eos_token_ids=eos_token_ids(model_dir, num_ids),
            max_model_len=config.model.max_model_len,
        )
    # How long torch's threads spin while they wait for a partner (libgomp's loops; read when torch is loaded). Between
    # the calls of a step other threads wait, see ``kernels/lists.py``; these spin between steps, and in torch's own
    # operations: with ten times more a step takes as long, and what shares the cores waits.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # With fewer threads than torch asks for, oneDNN leaves a part of its results as it was; `engine.threads` chooses.
    for setting in ("OMP_DYNAMIC", "OMP_THREAD_LIMIT"):
        os.environ.pop(setting, None)
    # oneDNN, and torch above it, keep a kernel for each shape that they have met, 0.3 to 0.6 MB each, and prompts bring
    # ever new ones: with 1024 in each cache, as is usual, 6,000 requests to a tiny model added 110 MB, and 6,000 shapes
    # of a product 1 GB. A new kernel takes some 1 ms, and all layers of a step share it.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    from engine.torch_core.engine import load_torch_engine  # seconds, and not for everyone

    return load_torch_engine(config, model_dir, tell)
