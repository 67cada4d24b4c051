"""llama.cpp on MODEL.gguf, one stream, as benchmarks/speculation.py asks it: alone, with drafts of a smaller model, or
with prompt lookup.

The loops are those of llama.cpp's own examples over its low-level API: drafts of a model end where its probability
falls below P_MIN, lookups are those of llama-cpp-python, and one llama_decode verifies what was drafted.
"""

import argparse
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_cpp import llama_speculative as lookup
from runners.answering import Answer, serve

BATCH = 512
CONTEXT = 4096
P_MIN = 0.75
"""A draft with a lower probability ends the drafts of a step; the default of llama.cpp's commands."""
CANDIDATES = 10
"""The best tokens among which a draft's probability counts, as in llama.cpp's draft sampler."""


class Model:
    """A model with one sequence."""

    def __init__(self, path: str, threads: int) -> None:
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise FileNotFoundError(f"llama.cpp cannot load {path}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp cannot make a context of {CONTEXT} tokens")
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self.tokens: list[int] = []
        """Tokens whose KV is in the cache."""

    def keep(self, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`."""
        if num_tokens < len(self.tokens):
            lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, num_tokens, -1)
            del self.tokens[num_tokens:]

    def decode(self, tokens: list[int], num_rows: int) -> list[Any]:
        """Compute these tokens. Returns the logits of the last `num_rows` of them, which the next call overwrites."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            for row, token in enumerate(part):
                self._batch.token[row] = token
                self._batch.pos[row] = len(self.tokens) + row
                self._batch.n_seq_id[row] = 1
                self._batch.seq_id[row][0] = 0
                self._batch.logits[row] = first + row >= len(tokens) - num_rows
            self._batch.n_tokens = len(part)
            code = lib.llama_decode(self._context, self._batch)
            if code:
                raise RuntimeError(f"llama_decode failed with {code}")
            self.tokens += part
        rows = range(len(part) - num_rows, len(part))
        shape = (self.vocab_size,)
        return [np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, row), shape=shape) for row in rows]


class Drafting:
    def __init__(self, args: argparse.Namespace) -> None:
        lib.llama_backend_init()
        self._silent = lib.llama_log_callback(lambda *_: None)  # kept: the library holds only its address
        lib.llama_log_set(self._silent, None)
        self._model = Model(args.model, args.threads)
        self._draft = Model(args.draft_model, args.threads) if args.draft_model else None
        self._most = args.most
        self._lookup = lookup.LlamaPromptLookupDecoding(2, args.most) if args.most and not args.draft_model else None
        self.info = {"name": "llama.cpp", "version": lib.__version__}

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        for model in (self._model, self._draft):
            if model is not None:
                model.keep(0)
        tokens, drafted, right = list(prompt), 0, 0
        tokens.append(int(self._model.decode(prompt, 1)[0].argmax()))
        while len(tokens) < len(prompt) + num_tokens:
            drafts = self._drafts(tokens, min(self._most, len(prompt) + num_tokens - len(tokens) - 1))
            rows = self._model.decode([tokens[-1], *drafts], 1 + len(drafts))
            best = [int(row.argmax()) for row in rows]
            kept = 0
            while kept < len(drafts) and drafts[kept] == best[kept]:
                kept += 1
            tokens += best[: kept + 1]
            self._model.keep(len(tokens) - 1)
            drafted, right = drafted + len(drafts), right + kept
        return Answer(tokens[len(prompt) :], drafted, right)

    def _drafts(self, tokens: list[int], most: int) -> list[int]:
        if most <= 0:
            return []
        if self._lookup is not None:
            return [int(token) for token in self._lookup(np.array(tokens, np.intc))[:most]]
        return [] if self._draft is None else self._by_model(self._draft, tokens, most)

    def _by_model(self, model: Model, tokens: list[int], most: int) -> list[int]:
        common = next((i for i, pair in enumerate(zip(model.tokens, tokens, strict=False)) if pair[0] != pair[1]), None)
        model.keep(min(len(model.tokens), len(tokens) - 1) if common is None else common)
        drafts: list[int] = []
        while len(drafts) < most:
            (logits,) = model.decode((tokens + drafts)[len(model.tokens) :], 1)
            token = int(logits.argmax())
            best = np.partition(logits, -CANDIDATES)[-CANDIDATES:]
            if 1 / np.exp(best - logits[token]).sum() < P_MIN:
                break
            drafts.append(token)
        return drafts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--most", type=int, default=0, help="drafts of a step")
    parser.add_argument("--threads", type=int, required=True)
    serve(Drafting(parser.parse_args()))


if __name__ == "__main__":
    main()
