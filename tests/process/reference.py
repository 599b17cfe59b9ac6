"""The oracle: greedy answers of `transformers` generate, with the margin of every choice.

`python tests/process/reference.py FOLDER NUM_TOKENS LENGTH...` prints one JSON object a line:
{"prompt": [...], "answer": [...], "margin": smallest gap between the two best logits}. For each length it tries
prompts until one has a margin over `MIN_MARGIN`, so that a different token can never be called a tie.
A program of its own, so that torch and its threads stay out of the tests' process.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIN_MARGIN = 2e-3
MAX_TRIES = 60


def answers(folder: Path, num_tokens: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # beside a busy machine, two that wait for each other are many times slower
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for length in lengths:
        for _ in range(MAX_TRIES):
            prompt = torch.randint(3, model.config.vocab_size, (1, length))
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.stack(out.logits)[:, 0].topk(2).values
            margin = (best[:, 0] - best[:, 1]).min().item()
            if margin > MIN_MARGIN:
                yield {"prompt": prompt[0].tolist(), "answer": out.sequences[0, length:].tolist(), "margin": margin}
                break
        else:
            raise SystemExit(f"no prompt of {length} tokens with margins over {MIN_MARGIN} in {MAX_TRIES} tries")


if __name__ == "__main__":
    for answer in answers(Path(sys.argv[1]), int(sys.argv[2]), [int(length) for length in sys.argv[3:]]):
        print(json.dumps(answer), flush=True)
