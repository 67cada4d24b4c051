"""vllm_lite, as a script uses it: client, engine and worker are processes of their own. Types that begin with q are
those of MODEL-DTYPE.gguf."""

import argparse
import sys

from runners.driver import Outcome, Request, main

from vllm_lite import LLM, SamplingParams, __version__


class Ours:
    def __init__(self, args: argparse.Namespace) -> None:
        is_file = args.dtype.startswith("q")
        quantization = None if is_file or args.dtype == "bf16" else args.dtype
        settings = {"device": "cpu", "dtype": "bfloat16", "cpu_threads": args.threads, "quantization": quantization}
        model = f"{args.model}-{args.dtype}.gguf" if is_file else args.model
        self._llm = LLM(model, max_num_seqs=256, **settings)  # as many as the others may have
        self.info = {"name": "vllm_lite", "version": __version__, "python": sys.version.split()[0]}

    def run(self, requests: list[Request]) -> Outcome:
        params = [
            SamplingParams(temperature=0.0, max_tokens=request["n"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = self._llm.generate([request["prompt"] for request in requests], params, use_tqdm=False)
        return Outcome(
            [list(output.outputs[0].token_ids) for output in outputs],
            [output.metrics.first_token_time or 0.0 for output in outputs],
            [output.metrics.last_token_time or 0.0 for output in outputs],
        )


if __name__ == "__main__":
    main(Ours)
