"""From configuration and model folder to an engine core.

Engine process. torch is imported here only once the configuration asks for it.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.core import EngineCore
from engine.model_files import eos_token_ids, vocab_size
from engine.simulated import SimulatedEngine
from tokservice.runtime.config import Config


def build_core(config: Config, model_dir: Path) -> EngineCore:
    """The core that the configuration asks for, ready to run. Raises StartupError with one line for the operator."""
    if config.engine.kind == "simulated":
        num_ids = vocab_size(model_dir)
        return SimulatedEngine(
            config.engine,
            config.simulated,
            vocab_size=num_ids,
            eos_token_ids=eos_token_ids(model_dir, num_ids),
            max_model_len=config.model.max_model_len,
        )
    # Threads that spin while they wait for a partner burn the core that the partner needs: beside other busy
    # processes on two cores a decode step took 40 ms without spinning and over 500 with. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from engine.torch_core.engine import load_torch_engine  # seconds, and not for everyone

    return load_torch_engine(config, model_dir)
