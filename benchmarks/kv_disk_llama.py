"""kv_disk.py for llama.cpp: a chat's next turn from memory, from a saved slot, and computed again.

    PEER/bin/python benchmarks/kv_disk_llama.py --model SmolLM2-135M-Instruct.Q4_1.gguf --tokens 7600

It calls what llama-server's `POST /slots/0?action=save` and `restore` call, llama_state_seq_save_file and
llama_state_seq_load_file, through llama-cpp-python, which has no server of that kind. Each restore has a process and a
context of its own, as after a restart, with the file in the page cache; no HTTP is in its times. `restore` is the load
alone, `first_s` that and the next turn's tokens up to the first one of the answer.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kv_chat import Chat, median, report

BATCH = 512


class Slot:
    """One sequence of llama.cpp."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp as lib

        self._lib = lib
        room = options.tokens + options.new + 64
        self._llm = lib.Llama(
            options.model, n_ctx=room, n_batch=BATCH, n_ubatch=BATCH, n_threads=2, n_threads_batch=2, verbose=False
        )
        self._num_tokens = 0
        self.compute([7] * 64)
        self.cut(0)

    def compute(self, tokens: list[int]) -> int:
        """Compute these tokens after the ones so far. Returns the most likely next token."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            batch = self._lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for place, token in enumerate(part):
                batch.token[place], batch.pos[place] = token, self._num_tokens + place
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
                batch.logits[place] = start + place == len(tokens) - 1
            if code := self._lib.llama_decode(self._llm.ctx, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            self._lib.llama_batch_free(batch)
            self._num_tokens += len(part)
        logits = self._lib.llama_get_logits_ith(self._llm.ctx, -1)
        return max(range(self._llm.n_vocab()), key=lambda token: logits[token])

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens after the first `num_tokens`."""
        memory = self._lib.llama_get_memory(self._llm.ctx)
        if not self._lib.llama_memory_seq_rm(memory, 0, num_tokens, -1):
            raise RuntimeError("llama.cpp cannot forget the end of this sequence")
        self._num_tokens = num_tokens

    def save(self, path: str, tokens: list[int]) -> int:
        array = (self._lib.llama_token * len(tokens))(*tokens)
        return int(self._lib.llama_state_seq_save_file(self._llm.ctx, path.encode(), 0, array, len(tokens)))

    def restore(self, path: str, num_tokens: int) -> None:
        array, count = (self._lib.llama_token * num_tokens)(), ctypes.c_size_t()
        found = self._lib.llama_state_seq_load_file(
            self._llm.ctx, path.encode(), 0, array, num_tokens, ctypes.byref(count)
        )
        if not found or count.value != num_tokens:
            raise RuntimeError(f"{path}: {count.value} tokens of {num_tokens} were restored")
        self._num_tokens = num_tokens


def first_token(slot: Slot, chat: Chat) -> dict[str, float]:
    """Seconds for the next turn's new tokens, after the chat that the slot has."""
    new, began_s = chat.turn()[len(chat.tokens) :], time.perf_counter()
    token = slot.compute(new)
    return {"first_s": time.perf_counter() - began_s, "token": token}


def restored(options: argparse.Namespace) -> dict[str, float]:
    """One restore, in this process."""
    chat, slot = Chat(options.tokens, options.new), Slot(options)
    began_s = time.perf_counter()
    slot.restore(options.restore, options.tokens)
    restore_s = time.perf_counter() - began_s
    found = first_token(slot, chat)
    return found | {"restore_s": restore_s, "first_s": found["first_s"] + restore_s}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found, chat, slot = dict[str, Any](), Chat(options.tokens, options.new), Slot(options)
    began_s = time.perf_counter()
    slot.compute(chat.tokens)
    found["prefill"] = {"first_s": time.perf_counter() - began_s}
    with tempfile.TemporaryDirectory(prefix="kv", dir=options.folder) as folder:
        path, began_s = f"{folder}/slot", time.perf_counter()
        found["bytes"] = slot.save(path, chat.tokens)
        found["save_s"] = time.perf_counter() - began_s
        runs = []
        for _ in range(options.rounds):
            runs.append(first_token(slot, chat))
            slot.cut(options.tokens)
        command = [sys.executable, __file__, "--model", options.model, "--tokens", str(options.tokens)]
        command += ["--new", str(options.new), "--restore", path]
        calls = [subprocess.run(command, check=True, stdout=subprocess.PIPE) for _ in range(options.rounds)]
        loads = [json.loads(call.stdout.splitlines()[-1]) for call in calls]
        token = runs[0]["token"]
        if any(load["token"] != token for load in loads):
            raise RuntimeError("the turn got another token from the restored slot than from memory")
        found |= {"warm": median(runs), "disk": median(loads)}
        for name in ("warm", "disk"):
            del found[name]["token"]  # each turn has its own
    found["disk / warm"] = found["disk"]["first_s"] / found["warm"]["first_s"]
    found["disk / cold"] = found["disk"]["first_s"] / (found["prefill"]["first_s"] + found["warm"]["first_s"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--tokens", type=int, default=7600, help="of the chat")
    parser.add_argument("--new", type=int, default=64, help="tokens of the next turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the slot is saved")
    parser.add_argument("--restore", help="restore this file once, and print what that took")
    parser.add_argument("--out", help="append to this JSON file")
    options = parser.parse_args()
    if options.restore:
        print(json.dumps(restored(options)))
        return
    found = {"engine": "llama.cpp"} | measure(options)
    report(Path(options.model).name, found, options.out, tokens=options.tokens, new=options.new)


if __name__ == "__main__":
    main()
