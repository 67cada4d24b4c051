"""llama.cpp's logits at every position of some texts, and its quantized files, by llama-cpp-python's low-level API.

    python llama_cpp_logits.py logits FILE.gguf TOKENS.json OUT.npy [--threads 2] [--kv f16]
    python llama_cpp_logits.py quantize DENSE.gguf OUT.gguf Q4_K_M

TOKENS.json has a list of lists of token ids; OUT.npy gets float32 [all their positions, vocabulary]. It runs in the
environment of llama-cpp-python, which has nothing of ours.
"""

import argparse
import json
from pathlib import Path

import llama_cpp as lib
import numpy as np

FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}
"""Numbers of enum llama_ftype."""
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8}
"""Numbers of enum ggml_type."""


def write_logits(args: argparse.Namespace) -> None:
    texts: list[list[int]] = json.loads(args.tokens.read_text())
    model = lib.llama_model_load_from_file(str(args.file).encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {args.file}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    out = np.empty((sum(map(len, texts)), vocab_size), dtype=np.float32)
    longest = max(map(len, texts))
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = (longest + 255) // 256 * 256
    params.n_threads = params.n_threads_batch = args.threads
    params.type_k = params.type_v = KV_TYPES[args.kv]
    if args.kv.startswith("q"):
        params.flash_attn_type = 1  # without it V cannot be quantized
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
    batch = lib.llama_batch_init(longest, 0, 1)
    first = 0
    for tokens in texts:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch.n_tokens = len(tokens)
        for position, token in enumerate(tokens):
            batch.token[position], batch.pos[position], batch.logits[position] = token, position, True
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
        if code := lib.llama_decode(context, batch):
            raise SystemExit(f"llama_decode failed with {code}")
        logits = lib.llama_get_logits(context)
        out[first : first + len(tokens)] = np.ctypeslib.as_array(logits, shape=(len(tokens), vocab_size))
        first += len(tokens)
    np.save(args.out, out)


def quantize(args: argparse.Namespace) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[args.type]
    if lib.llama_model_quantize(str(args.file).encode(), str(args.out).encode(), params):
        raise SystemExit(f"llama.cpp cannot make {args.type} of {args.file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    logits = commands.add_parser("logits")
    logits.add_argument("file", type=Path)
    logits.add_argument("tokens", type=Path)
    logits.add_argument("out", type=Path)
    logits.add_argument("--threads", type=int, default=2)
    logits.add_argument("--kv", choices=sorted(KV_TYPES), default="f16")
    logits.set_defaults(run=write_logits)
    quantizing = commands.add_parser("quantize")
    quantizing.add_argument("file", type=Path)
    quantizing.add_argument("out", type=Path)
    quantizing.add_argument("type", choices=sorted(FILE_TYPES))
    quantizing.set_defaults(run=quantize)
    args = parser.parse_args()
    silent = lib.llama_log_callback(lambda *_: None)  # kept: the library holds only its address
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    args.run(args)


if __name__ == "__main__":
    main()
