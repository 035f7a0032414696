"""Greedy text of the default model against transformers, alone and batched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers.tiny_models import drain, ids_of, make_engine, request, run_alone
from tokservice.models.default_model import ensure_default_model

TEXTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
    "The",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "Das Wetter in Berlin ist",
    "import numpy as np\n\nx =",
    "Water boils at",
    "The history of the Roman empire, " * 8,
    "Question: what is two plus two?\nAnswer:",
    "A B C D E F",
)
OUTPUT = 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_ids_equal_transformers() -> None:
    import transformers

    torch.set_num_threads(1)
    model_dir = ensure_default_model()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [
            model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=OUTPUT,
                attention_mask=torch.ones(1, len(prompt)),
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    requests = [
        request(f"r{i}", np.array(prompt), temperature=0.0, max_tokens=OUTPUT) for i, prompt in enumerate(prompts)
    ]
    for settings in ({"weight_format": "float32"}, {"deterministic": True}, {"weight_format": "auto"}):
        engine = make_engine(model_dir, max_num_batched_tokens=64, **settings)
        assert [run_alone(engine, one) for one in requests] == expected
        for one in requests:
            engine.add(one)
        outputs = drain(engine)
        assert [ids_of(outputs, f"r{i}") for i in range(len(prompts))] == expected
