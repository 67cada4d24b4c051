"""Acceptance of KV on disk: `python -m tests.acceptance.kv_disk_check [FAULTS] [ENGINE_FAULTS] [SEED]`.

Injects FAULTS into directories that stores read and write (kv_disk_faults.py), and ENGINE_FAULTS into one that whole
engines answer from: with and without salts and adapters, in two types, started anew now and then, also after SIGKILL of
a worker. The memory's cache is emptied before each request, so that what is found comes from disk. Nothing may be
wrong: no token, no crash, and no more bytes than the quota; and something has to come from disk.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.acceptance import kv_disk_faults
from tests.acceptance.kv_disk_faults import FileFaults
from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.e2e.test_processes import family
from tests.lora_adapters import make_adapter
from vllm_lite import LLM, LoRARequest, SamplingParams
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.errors import EngineDeadError
from vllm_lite.kv_disk import store
from vllm_lite.kv_disk.usage import held_files

QUOTA = "600KiB"
"""Quota of little more than half of the prompts' bytes, so that files are evicted all the time."""
LIFE = 60
"""Requests of an engine before it is replaced."""
DTYPES = ("float32", "bfloat16")
SALTS = (None, "salt")


class EngineFaults:
    """Sends earlier requests to engines on one directory, after a fault each time."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.draw = draw
        self.base = make_checkpoint(folder / "base")
        self.adapters = {"": None} | {
            name: make_adapter(self.base, folder / name, seed=seed) for seed, name in enumerate(("one", "two"), 1)
        }
        self.kv = folder / "kv"
        self.faults = FileFaults(self.kv, draw)
        self.prompts = [[draw.randrange(3, 380) for _ in range(draw.randint(40, 160))] for _ in range(2)]
        self.expected: dict[tuple[str, int, str], list[int]] = {}
        self.counts = Counter[str]()
        self.dtype = DTYPES[0]

    def open(self, **settings: Any) -> LLM:
        modules = tuple({"name": name, "path": str(path)} for name, path in self.adapters.items() if path is not None)
        usual: dict[str, Any] = {"device": "cpu", "dtype": self.dtype, "max_model_len": 256, "enable_lora": True}
        return LLM(self.base, lora_modules=modules, max_loras=2, **{**usual, **settings})

    def ask(self, llm: LLM, number: int, adapter: str, salt: str | None) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, cache_salt=salt)
        prompt = TokensPrompt(prompt_token_ids=self.prompts[number])
        request = LoRARequest(adapter, 1, "") if adapter else None
        (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=request)
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    def learn(self) -> None:
        """Compute the tokens of each prompt with each adapter, by engines without a disk."""
        for self.dtype in DTYPES:
            with self.open(single_process=True) as llm:
                for adapter in self.adapters:
                    for number in range(len(self.prompts)):
                        self.expected[self.dtype, number, adapter] = self.ask(llm, number, adapter, None)[0]

    def run(self, count: int) -> None:
        self.learn()
        while count > 0:
            self.dtype = DTYPES[self.draw.random() < 0.2]
            kills = self.draw.random() < 0.2
            settings = {"kv_cache_dir": str(self.kv), "kv_cache_dir_size": QUOTA, "single_process": not kills}
            with self.open(**settings) as llm:
                for _ in range(min(count, LIFE)):
                    self.one(llm, kills=kills)
                disk = llm.stats().disk
                self.counts.update({} if disk is None else {f"dropped: {why}": n for why, n in disk.errors.items()})
            count -= LIFE

    def one(self, llm: LLM, *, kills: bool) -> None:
        if kills and self.draw.random() < 0.05 and isinstance(llm.launched, LaunchedEngine):
            os.kill(family(llm.launched.pid)[1], signal.SIGKILL)
            self.counts["workers killed"] += 1
            until_there(llm)
        else:
            self.draw.choice(self.faults.kinds)()
        llm.reset_prefix_cache()
        number, adapter = self.draw.randrange(len(self.prompts)), self.draw.choice(list(self.adapters))
        tokens, cached = self.ask(llm, number, adapter, self.draw.choice(SALTS))
        self.counts["asked"] += 1
        self.counts["from disk" if cached else "computed"] += 1
        if tokens != self.expected[self.dtype, number, adapter]:
            self.counts["WRONG"] += 1


def until_there(llm: LLM) -> None:
    """Wait until killed workers have been replaced."""
    deadline_s = time.monotonic() + scaled(60.0)
    generation = 0
    while not generation:
        try:
            generation = llm.stats().generation
        except EngineDeadError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def main() -> int:
    given = [int(each) for each in sys.argv[1:]]
    num_faults, num_engine_faults, seed = (*given, *(10_000, 1_000, 0)[len(given) :])
    began_s, bad = time.monotonic(), 0
    store.PAUSE_S = 0.0  # of engines in this process: after a refused write they would compute for ten seconds
    with tempfile.TemporaryDirectory() as folder:
        counts = kv_disk_faults.run(Path(folder), num_faults, seed)
    print(f"{num_faults} faults of stores in {time.monotonic() - began_s:.0f} s:", dict(counts), flush=True)
    bad += counts["WRONG"] + counts["OVER QUOTA"]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engines = EngineFaults(Path(folder), random.Random(seed))
        engines.run(num_engine_faults)
        left = sum(held.num_bytes for held in held_files(engines.kv))
    print(f"{num_engine_faults} faults of engines in {time.monotonic() - began_s:.0f} s:", dict(engines.counts))
    print(f"{left / 1024:.0f} KiB are left of a quota of {QUOTA}")
    bad += engines.counts["WRONG"] + (left > 600 * 1024) + (not engines.counts["from disk"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
