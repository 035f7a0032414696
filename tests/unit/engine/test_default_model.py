"""Greedy text of the default model against transformers in float32, alone and batched."""

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

# In logits. Where float32 has two tokens closer than this, bfloat16 may choose the other: it moves the difference
# of two likely tokens by 0.04 (standard deviation, over the text of ``bench_engine.py --quality``).
NEAR_TIE = 0.1


def check_greedy(ids: list[int], expected: list[int], logits: list[torch.Tensor], near_tie: float) -> None:
    """The expected ids, up to a token that was nearly tied: what follows another token is another text.

    ``logits``: (vocab_size,) in float32 for each expected token.
    """
    for place, (token, right) in enumerate(zip(ids, expected, strict=True)):
        if token != right:
            gap = (logits[place][right] - logits[place][token]).item()
            assert gap < near_tie, (place, ids, expected, gap)
            return


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_ids_equal_transformers() -> None:
    import transformers

    torch.set_num_threads(1)
    model_dir = ensure_default_model()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    expected, logits = [], []
    with torch.inference_mode():
        for prompt in prompts:
            answer = model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=OUTPUT,
                attention_mask=torch.ones(1, len(prompt)),
                return_dict_in_generate=True,
                output_logits=True,
            )
            expected.append(answer.sequences[0, len(prompt) :].tolist())
            logits.append([row[0] for row in answer.logits])
    requests = [
        request(f"r{i}", np.array(prompt), temperature=0.0, max_tokens=OUTPUT) for i, prompt in enumerate(prompts)
    ]
    for near_tie, settings in (
        (0.0, {"weight_format": "float32"}),
        (0.0, {"deterministic": True}),
        (NEAR_TIE, {"weight_format": "auto"}),
    ):
        engine = make_engine(model_dir, max_num_batched_tokens=64, **settings)
        alone = [run_alone(engine, one) for one in requests]
        for one in requests:
            engine.add(one)
        outputs = drain(engine)
        batched = [ids_of(outputs, one.request_id) for one in requests]
        for texts in (alone, batched):
            for ids, right, rows in zip(texts, expected, logits, strict=True):
                check_greedy(ids, right, rows, near_tie)
