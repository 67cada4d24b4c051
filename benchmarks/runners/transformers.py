"""transformers' generate on one left-padded batch: the reference for tokens."""

import argparse
import time
from typing import Any

import torch
import transformers
from runners.driver import Outcome, Request, main


class Transformers:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        dtype = {"bf16": torch.bfloat16}[args.dtype]
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(args.model, dtype=dtype, attn_implementation="sdpa").eval()
        self.info = {"name": "transformers", "version": transformers.__version__, "torch": torch.__version__}

    def run(self, requests: list[Request]) -> Outcome:
        """One static batch: the caller's requests all generate the same number of tokens."""
        length = max(len(request["prompt"]) for request in requests)
        ids = torch.zeros(len(requests), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            begin = length - len(request["prompt"])
            ids[row, begin:] = torch.tensor(request["prompt"])
            mask[row, begin:] = 1
        steps_s: list[float] = []

        def note(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            steps_s.append(time.monotonic())
            return torch.zeros(len(ids), dtype=torch.bool)

        num_tokens = requests[0]["n"]
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        count = len(requests)
        return Outcome(output[:, length:].tolist(), [steps_s[0]] * count, [steps_s[-1]] * count)


if __name__ == "__main__":
    main(Transformers)
