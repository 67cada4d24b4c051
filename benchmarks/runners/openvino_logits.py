"""OpenVINO's logits at every position of some texts, and its quantized models.

    python openvino_logits.py quantize MODEL.xml OUT.xml int8|int4 [--group-size 128]
    python openvino_logits.py logits MODEL.xml TOKENS.json OUT.npy [--threads 2] [--exact]

MODEL.xml is what `optimum-cli export openvino --weight-format fp32` makes of a checkpoint. TOKENS.json has a list of
lists of token ids; OUT.npy gets float32 [all their positions, vocabulary]. It runs in the environment of OpenVINO,
which has nothing of ours.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import openvino as ov

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
"""The errors of weights alone. Without it the processor's plugin chooses, as it does in the race."""


def write_logits(args: argparse.Namespace) -> None:
    texts: list[list[int]] = json.loads(args.tokens.read_text())
    hints = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
    core = ov.Core()
    request = core.compile_model(core.read_model(args.model), "CPU", hints | (EXACT if args.exact else {}))
    for name in EXACT:
        print(f"{name}: {request.get_property(name)}", flush=True)
    request = request.create_infer_request()
    parts = []
    for tokens in texts:
        request.reset_state()
        ids = np.array([tokens], dtype=np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        parts.append(request.infer(inputs)["logits"][0].astype(np.float32))
    np.save(args.out, np.concatenate(parts))


def quantize(args: argparse.Namespace) -> None:
    """Do as optimum-cli: a scale and a zero point for each group, or in 8 bits for each row; the head has 8 bits."""
    import nncf

    mode = {"int8": nncf.CompressWeightsMode.INT8_ASYM, "int4": nncf.CompressWeightsMode.INT4_ASYM}[args.form]
    groups = {}
    if args.form == "int4":  # rows that are not whole groups get the largest smaller ones that fit
        fallback = nncf.quantization.advanced_parameters.GroupSizeFallbackMode.ADJUST
        advanced = nncf.AdvancedCompressionParameters(group_size_fallback_mode=fallback)
        groups = {"group_size": args.group_size, "ratio": 1.0, "advanced_parameters": advanced}
    ov.save_model(nncf.compress_weights(ov.Core().read_model(args.model), mode=mode, **groups), args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    logits = commands.add_parser("logits")
    logits.add_argument("model", type=Path)
    logits.add_argument("tokens", type=Path)
    logits.add_argument("out", type=Path)
    logits.add_argument("--threads", type=int, default=2)
    logits.add_argument("--exact", action="store_true", help="float32, and no dynamic quantization of activations")
    logits.set_defaults(run=write_logits)
    quantizing = commands.add_parser("quantize")
    quantizing.add_argument("model", type=Path)
    quantizing.add_argument("out", type=Path)
    quantizing.add_argument("form", choices=("int8", "int4"))
    quantizing.add_argument("--group-size", type=int, default=128, help="inputs that share a scale of int4")
    quantizing.set_defaults(run=quantize)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
