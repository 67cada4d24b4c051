"""OpenVINO GenAI on a folder that optimum-cli exported, one stream, as benchmarks/speculation.py asks it: alone, with
its draft pipeline, or with its prompt lookup."""

import argparse

import numpy as np
import openvino
import openvino_genai
from runners.answering import Answer, serve

LONGEST_NGRAM = 3


class Drafting:
    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.enable_prefix_caching = False
        hints = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        if args.draft_model:
            hints["draft_model"] = openvino_genai.draft_model(args.draft_model, "CPU", **hints)
        elif args.most:
            hints["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(args.model, "CPU", scheduler_config=scheduler, **hints)
        self._most, self._looks_up = args.most, bool(args.most) and not args.draft_model
        self.info = {"name": "OpenVINO GenAI", "version": openvino_genai.__version__}

    def answer(self, prompt: list[int], num_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = config.apply_chat_template = False
        if self._most:
            config.num_assistant_tokens = self._most
        if self._looks_up:
            config.max_ngram_size = LONGEST_NGRAM
        result = self._pipeline.generate(openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        return Answer([int(token) for token in result.tokens[0]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--most", type=int, default=0, help="drafts of a step")
    parser.add_argument("--threads", type=int, required=True)
    serve(Drafting(parser.parse_args()))


if __name__ == "__main__":
    main()
