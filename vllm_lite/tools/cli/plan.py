"""What MODEL takes on a machine, what fits beside it, and the flags for that: from config.json and the headers of its
weights alone. Exit status 1 if what is asked is impossible, with what would make it possible."""

import argparse
import sys

import msgspec

from vllm_lite.config import GIB
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.tools.plan import NOT_YET, Plan, PlanConfig, load, make_plan, serves_ranks


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="folder of a Hugging Face checkpoint, or org/model")
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    parser.add_argument("--json", action="store_true", help="print one object with everything")
    add_config_flags(parser, PlanConfig)


def run(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name) for name in PlanConfig.__struct_fields__}
    flags["model"] = arguments.folder or arguments.model
    config = PlanConfig.load(flags, file=arguments.config)
    plan = make_plan(config, load(config))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(plan) | {"fits": plan.fits})).decode())
    else:
        _print(plan)
    return 0 if plan.fits else 1


def _print(plan: Plan) -> None:
    for name, value, remark in _rows(plan):
        print(f"  {name:<26} {value:>14}  {remark}".rstrip())
    if plan.fits:
        print(f"\nIt fits. {plan.command}")
    else:
        print("\nIt does not fit: " + "; ".join(plan.problems) + ".")
        if plan.advice:
            print("Possible with one of\n" + "\n".join(f"  {line}" for line in plan.advice))
    if not serves_ranks(plan.tensor_parallel_size):
        print(f"{plan.tensor_parallel_size} GPUs{NOT_YET}", file=sys.stderr)


def _rows(plan: Plan) -> list[tuple[str, str, str]]:
    gpus = f" of {plan.tensor_parallel_size}" if plan.tensor_parallel_size > 1 else ""
    is_gpu = plan.device == "cuda"
    per_token = f"{plan.kv_bytes_per_token_beyond_windows / 1024:.1f} KiB beyond its windows"
    windowed = plan.kv_bytes_per_token_beyond_windows != plan.kv_bytes_per_token
    rows = [
        ("model", plan.model, f"{plan.architecture}, {plan.num_parameters / 1e6:,.1f}M parameters"),
        ("memory", _size(plan.memory_bytes), f"of a GPU{gpus}, {_size(plan.usable_bytes)} to use" if is_gpu else ""),
        ("weights", _size(plan.weights_bytes), plan.quantization or plan.dtype),
        ("activations", _size(plan.activations_bytes), f"estimate, {plan.max_num_batched_tokens} tokens in a step"),
    ]
    if plan.graph_bytes:
        rows.append(("CUDA graphs", _size(plan.graph_bytes), f"up to {plan.max_num_seqs} sequences"))
    rows += [
        ("processes", _size(plan.outside_bytes), "estimate"),
        ("KV cache", _size(plan.kv_cache_bytes), f"{plan.num_blocks:,} blocks of {plan.block_size} tokens"),
        ("  of one token", f"{plan.kv_bytes_per_token / 1024:.1f} KiB", per_token if windowed else plan.kv_cache_dtype),
        ("  tokens", f"{plan.kv_tokens:,}", ""),
        ("longest request", f"{plan.max_model_len:,}", f"tokens, of the model's {plan.max_position_embeddings:,}"),
        ("such requests at once", f"{plan.concurrent_requests:,}", f"in steps of up to {plan.max_num_seqs}"),
        ("longest that could fit", f"{plan.largest_max_model_len:,}", "tokens, with all of the memory"),
    ]
    if plan.num_host_blocks:
        rows.append(("swap space", _size(plan.num_host_blocks * plan.block_bytes), f"{plan.num_host_blocks:,} blocks"))
    return rows


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.2f} MiB"
