"""llama.cpp on MODEL-DTYPE.gguf through llama-cpp-python's low-level API.

One llama_batch of many sequences per llama_decode, as llama-server's slots do it: first a token of every sequence
that decodes, then prompt tokens as long as there is room.
"""

import argparse
import time
from typing import Any

import llama_cpp as lib
import numpy as np
from runners.driver import Outcome, Recorder, Request, main, shared_prefix

BATCH = 2048
MICRO_BATCH = 512


class LlamaCpp:
    def __init__(self, args: argparse.Namespace) -> None:
        lib.llama_backend_init()
        self._silent = lib.llama_log_callback(lambda *_: None)  # kept: the library holds only its address
        lib.llama_log_set(self._silent, None)
        path = f"{args.model}-{args.dtype}.gguf"
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise FileNotFoundError(f"llama.cpp cannot load {path}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._threads = args.threads
        self._context: Any = None
        self._shape = (0, 0)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        system = lib.llama_print_system_info().decode()
        self.info = {"name": "llama.cpp", "version": lib.__version__, "system": system}

    def run(self, requests: list[Request]) -> Outcome:
        count = len(requests)
        num_tokens = sum(len(request["prompt"]) + request["n"] for request in requests)
        self._prepare(count, (num_tokens + 32 * count + 255) // 256 * 256)
        recorder = Recorder(count)
        last = [-1] * count  # the newest token, once the prompt is done
        left = [request["n"] for request in requests]
        done = [0] * count  # positions in the cache
        shared = shared_prefix(requests)
        while any(left):
            sampled: list[tuple[int, int]] = []  # sequence and row of the batch
            self._batch.n_tokens = 0
            for sequence in range(count):
                if last[sequence] >= 0 and left[sequence]:
                    sampled.append((sequence, self._add(last[sequence], done[sequence], sequence, logits=True)))
                    done[sequence] += 1
            for sequence, request in enumerate(requests[:1] if shared else requests):
                prompt = request["prompt"]
                end = min(shared or len(prompt), done[sequence] + BATCH - self._batch.n_tokens)
                for position in range(done[sequence], end):
                    row = self._add(prompt[position], position, sequence, logits=position == len(prompt) - 1)
                    if position == len(prompt) - 1:
                        sampled.append((sequence, row))
                done[sequence] = max(done[sequence], end)
            self._decode()
            if shared and done[0] >= shared:  # from here on every sequence goes its own way
                for sequence in range(1, count):
                    lib.llama_memory_seq_cp(self._memory, 0, sequence, 0, shared)
                    done[sequence] = shared
                shared = 0
            tokens = [self._argmax(row) for _, row in sampled]
            now_s = time.monotonic()
            for (sequence, _), token in zip(sampled, tokens, strict=True):
                recorder.add(sequence, [token], now_s)
                last[sequence] = token
                left[sequence] -= 1
        return recorder.outcome()

    def _prepare(self, num_sequences: int, num_tokens: int) -> None:
        """Get an empty cache for `num_tokens` tokens; reuses the current one if it fits."""
        if self._shape == (num_sequences, num_tokens):
            lib.llama_memory_clear(self._memory, True)
            return
        if self._context:
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num_tokens, BATCH, MICRO_BATCH
        params.n_seq_max, params.kv_unified = num_sequences, True
        params.n_threads = params.n_threads_batch = self._threads
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp cannot make a context of {num_tokens} tokens")
        self._shape = (num_sequences, num_tokens)

    @property
    def _memory(self) -> Any:
        return lib.llama_get_memory(self._context)

    def _add(self, token: int, position: int, sequence: int, *, logits: bool) -> int:
        """Put a token into the batch. Returns its row."""
        row = self._batch.n_tokens
        self._batch.token[row] = token
        self._batch.pos[row] = position
        self._batch.n_seq_id[row] = 1
        self._batch.seq_id[row][0] = sequence
        self._batch.logits[row] = logits
        self._batch.n_tokens += 1
        return int(row)

    def _decode(self) -> None:
        code = lib.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")

    def _argmax(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context, row)  # float32 [vocab_size]
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    main(LlamaCpp)
