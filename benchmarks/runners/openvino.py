"""OpenVINO GenAI's ContinuousBatchingPipeline on MODEL-ov-DTYPE, which optimum-cli exported."""

import argparse
import time

import numpy as np
import openvino
import openvino_genai
from runners.driver import Outcome, Recorder, Request, main


class OpenVino:
    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4  # GiB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        hints = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
        folder = f"{args.model}-ov-{args.dtype}"
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", hints)
        self._next_id = 0
        self.info = {"name": "OpenVINO GenAI", "version": openvino_genai.__version__}

    def run(self, requests: list[Request]) -> Outcome:
        recorder = Recorder(len(requests))
        handles = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request["n"]
            config.ignore_eos = True
            config.do_sample = config.apply_chat_template = False
            prompt = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next_id, prompt, config))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.monotonic()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        if output.generated_ids:
                            recorder.add(place, list(output.generated_ids), now_s)
        return recorder.outcome()


if __name__ == "__main__":
    main(OpenVino)
