"""CTranslate2's Generator on MODEL-ct2-DTYPE, which ct2-transformers-converter made. Static batches."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from runners.driver import Outcome, Recorder, Request, main, shared_prefix


class CTranslate2:
    def __init__(self, args: argparse.Namespace) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))  # read when ctranslate2 is imported
        import ctranslate2

        compute_type = {"int8": "int8_float32"}[args.dtype]
        folder = f"{args.model}-ct2-{args.dtype}"
        threads = {"inter_threads": 1, "intra_threads": args.threads, "max_queued_batches": -1}
        self._generator = ctranslate2.Generator(folder, device="cpu", compute_type=compute_type, **threads)
        vocabulary = json.loads((Path(args.model) / "tokenizer.json").read_text())["model"]["vocab"]
        self._words = {token: word for word, token in vocabulary.items()}  # prompts are given as words
        self.info = {"name": "CTranslate2", "version": ctranslate2.__version__, "compute": self._generator.compute_type}

    def run(self, requests: list[Request]) -> Outcome:
        """One static batch: the caller's requests all generate the same number of tokens."""
        recorder = Recorder(len(requests))
        shared = shared_prefix(requests)
        prompts = [[self._words[token] for token in request["prompt"]] for request in requests]

        def note(step: Any) -> bool:
            recorder.add(step.batch_id, [step.token_id], time.monotonic())
            return False

        num_tokens = requests[0]["n"]
        self._generator.generate_batch(
            [prompt[shared:] for prompt in prompts],
            static_prompt=prompts[0][:shared] or None,
            max_batch_size=len(requests),
            max_length=num_tokens,
            min_length=num_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
            callback=note,
        )
        return recorder.outcome()


if __name__ == "__main__":
    main(CTranslate2)
