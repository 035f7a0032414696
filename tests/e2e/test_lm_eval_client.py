"""``lm-eval`` (``local-completions``) against the default model: log-likelihoods and texts of a small quiz.

lm-eval brings some 40 packages and 0.9 GB with it, so it lives in an environment of its own, in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.server import ROOT, Server, running_server
from tokservice.models.default_model import ensure_default_model
from tokservice.runtime.cache_dir import cache_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CACHE = cache_dir() / "lm-eval"  # the user's own, whatever a test makes of the environment later
REQUIREMENTS = ("lm-eval[api]", "transformers")
MODEL_DIR = ensure_default_model()
CONSTRAINTS = ROOT / "constraints.txt"
QUIZ = Path(__file__).parent / "lm_eval" / "quiz.jsonl"
QUESTION = "Question: {{question}}\nAnswer:"
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(QUIZ)}},
    "test_split": "test",
    "doc_to_text": QUESTION,
}
TASKS: dict[str, dict[str, Any]] = {
    "quiz_choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"},
    "quiz_text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "do_sample": False, "max_gen_toks": 12},
    },
}
METRICS = {"quiz_choice": "acc", "quiz_text": "exact_match"}


def python() -> Path:
    """The interpreter of the environment, which is made where there is none yet."""
    digest = hashlib.sha256(repr((REQUIREMENTS, CONSTRAINTS.read_text(), sys.version)).encode()).hexdigest()
    folder = CACHE / digest[:16]
    ready = folder / "ready"
    if not ready.exists():
        shutil.rmtree(CACHE, ignore_errors=True)  # of other versions too
        venv.create(folder, with_pip=True)
        pip: list[str | Path] = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            CONSTRAINTS,
            *REQUIREMENTS,
        ]
        subprocess.run(pip, check=True, timeout=1200)
        ready.touch()
    return folder / "bin" / "python"


def evaluate(url: str, folder: Path, batch_size: int, **more: object) -> dict[str, dict[str, Any]]:
    """Task -> what lm-eval wrote: ``results``, and its ``samples`` in the order of the quiz."""
    for name, task in TASKS.items():
        metric = {"metric": METRICS[name], "aggregation": "mean", "higher_is_better": True}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, **task, "metric_list": [metric]}))
    arguments = {"model": "smollm2-135m-instruct", "base_url": f"{url}/v1/completions", "tokenizer": MODEL_DIR} | more
    command: list[str | Path] = [python(), "-m", "lm_eval", "run", "--model", "local-completions", "--log_samples"]
    command += ["--batch_size", str(batch_size)]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--tasks", ",".join(TASKS), "--include_path", folder, "--output_path", folder / "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "NO_PROXY": "*"}
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (results,) = (folder / "out").rglob("results_*.json")
    found = {}
    for name in TASKS:
        (samples,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))
        found[name] = {"results": json.loads(results.read_text())["results"][name], "samples": lines}
    return found


@pytest.fixture(scope="module")
def reference() -> list[list[tuple[float, bool]]]:
    """Question -> choice -> (log-likelihood, whether it is the greedy one), by transformers in float32."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    scored: list[list[tuple[float, bool]]] = []
    for entry in map(json.loads, QUIZ.read_text().splitlines()):
        question = QUESTION.replace("{{question}}", entry["question"])
        scored.append([])
        for choice in entry["choices"]:
            start = len(tokenizer(question).input_ids)
            ids = tokenizer(f"{question} {choice}").input_ids
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            target = torch.tensor(ids[start:])
            rows = logits[start - 1 : -1]
            value = rows.gather(1, target[:, None]).sum().item()
            scored[-1].append((value, bool((rows.argmax(-1) == target).all())))
    return scored


@pytest.fixture(scope="module")
def exact() -> Iterator[Server]:
    """The default model with the weights that it has on disk."""
    with running_server("--set", "engine.weight_format=float32") as server:
        yield server


@pytest.mark.parametrize(
    ("batch_size", "more"), [(1, {"num_concurrent": 4}), (8, {}), (1, {"tokenized_requests": False})]
)
def test_log_likelihoods_are_the_models_own(
    tmp_path: Path,
    exact: Server,
    reference: list[list[tuple[float, bool]]],
    batch_size: int,
    more: dict[str, object],
) -> None:
    found = evaluate(exact.url, tmp_path, batch_size, **more)
    choice = found["quiz_choice"]
    values = [[(float(value), greedy == "True") for ((value, greedy),) in one["resps"]] for one in choice["samples"]]
    assert np.array(values).shape == (10, 4, 2)
    np.testing.assert_allclose(
        [[value for value, _ in one] for one in values], [[value for value, _ in one] for one in reference], atol=0.01
    )
    assert [[greedy for _, greedy in one] for one in values] == [[greedy for _, greedy in one] for one in reference]
    answers = [json.loads(line)["answer"] for line in QUIZ.read_text().splitlines()]
    best = [int(np.argmax([value for value, _ in one])) for one in reference]
    assert choice["results"]["acc,none"] == sum(map(int.__eq__, best, answers)) / 10
    texts = [one["resps"][0][0] for one in found["quiz_text"]["samples"]]
    assert len(texts) == 10
    assert all("." not in text for text in texts)
    assert any(texts)
