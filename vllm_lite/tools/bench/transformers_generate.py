"""`transformers` generate on a model with random weights, as a process that measures one batch for every line of input.

    python -m vllm_lite.tools.bench.transformers_generate FOLDER DTYPE THREADS INPUT_LEN OUTPUT_LEN

A line is the batch size; the answer is a line with the seconds of the batch. Greedy; prompts are random ids.
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(folder: str, dtype: str, threads: str, input_len: str, output_len: str) -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    kind = config.dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="sdpa").eval()
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = torch.randint(5, config.vocab_size, (int(line), int(input_len)))
        start_s = time.perf_counter()
        with torch.inference_mode():
            generated = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=int(output_len),
                max_new_tokens=int(output_len),
                pad_token_id=0,
            )
        took_s = time.perf_counter() - start_s
        if generated.shape[1] != int(input_len) + int(output_len):
            raise RuntimeError(f"expected {output_len} new tokens, got {generated.shape[1] - int(input_len)}")
        print(took_s, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
