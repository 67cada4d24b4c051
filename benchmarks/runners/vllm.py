"""vLLM's CPU build, its engine in this process.

Its documentation recommends tcmalloc and Intel's OpenMP library by LD_PRELOAD; peers.py sets that.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from runners.driver import Outcome, Recorder, Request, main


class Vllm:
    def __init__(self, args: argparse.Namespace) -> None:
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        for name, value in settings.items():
            os.environ.setdefault(name, value)  # read when vllm is imported
        import vllm

        self._vllm = vllm
        dtype = {"bf16": "bfloat16"}[args.dtype]
        positions = json.loads((Path(args.model) / "config.json").read_text())["max_position_embeddings"]
        limits: dict[str, Any] = {"max_model_len": min(20_480, positions), "max_num_seqs": 256}
        limits["enable_prefix_caching"] = True
        self._engine = vllm.LLM(args.model, dtype=dtype, seed=0, disable_log_stats=True, **limits).llm_engine
        self._next_id = 0
        self.info = {"name": "vLLM CPU", "version": vllm.__version__}

    def run(self, requests: list[Request]) -> Outcome:
        recorder = Recorder(len(requests))
        begin = self._next_id
        for request in requests:
            params = self._vllm.SamplingParams(
                temperature=0, ignore_eos=True, max_tokens=request["n"], detokenize=False
            )
            self._engine.add_request(str(self._next_id), {"prompt_token_ids": request["prompt"]}, params)
            self._next_id += 1
        seen = [0] * len(requests)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now_s = time.monotonic()
                place = int(output.request_id.split("-")[0]) - begin  # newer versions append "-" and a random part
                tokens = list(output.outputs[0].token_ids)
                if len(tokens) > seen[place]:
                    recorder.add(place, tokens[seen[place] :], now_s)
                    seen[place] = len(tokens)
        return recorder.outcome()


if __name__ == "__main__":
    main(Vllm)
