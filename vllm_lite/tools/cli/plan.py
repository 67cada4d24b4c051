"""Show the memory of MODEL on a machine, the requests that fit beside it, and the flags for that, from config.json and
the headers of its weights alone. Exit status 1 if the request is impossible, with changes that would make it
possible."""

import argparse
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_lite.checkpoint.parameter_count import describe_parameters
from vllm_lite.config import GIB
from vllm_lite.errors import ConfigError
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.tools.plan import CapacityPlan, PlanConfig, RankPlan, make_plan
from vllm_lite.tools.plan_checkpoint import load
from vllm_lite.tools.plan_disk import DiskPlan, plan_disk

if TYPE_CHECKING:
    from vllm_lite.tools.simulate.variants import Simulated


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="folder of a Hugging Face checkpoint, or org/model")
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    parser.add_argument(
        "--load",
        metavar="TRACE",
        help="a trace of `serve --record`: simulate its requests with the plan's sizes and the trace's step times",
    )
    parser.add_argument("--json", action="store_true", help="print one object with everything")
    add_config_flags(parser, PlanConfig)


def run(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name) for name in PlanConfig.__struct_fields__}
    flags["model"] = arguments.model if arguments.folder is None else arguments.folder
    config = PlanConfig.load(flags, file=arguments.config)
    plan = make_plan(config, load(config))
    of_all_ranks = plan.kv_bytes_per_token * (plan.tensor_parallel_size if plan.device == "cuda" else 1)
    plan = msgspec.structs.replace(plan, disk=plan_disk(config, of_all_ranks))
    served = None if arguments.load is None or not plan.fits else _simulated(arguments.load, plan)
    if arguments.json:
        found = msgspec.to_builtins(plan) | {"fits": plan.fits} | ({} if served is None else {"load": _figures(served)})
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _print(plan)
        if served is not None:
            _print_load(served)
    return 0 if plan.fits else 1


def _simulated(trace: str, plan: CapacityPlan) -> "Simulated":
    """Simulate the load of a trace with the planned sizes. Raises ConfigError."""
    from vllm_lite.tools.simulate import fit
    from vllm_lite.tools.simulate.load import load_of
    from vllm_lite.tools.simulate.recording import Recording
    from vllm_lite.tools.simulate.variants import simulate

    recording = Recording(trace).read()
    if (size := recording.reader.header.block_size) != plan.block_size:
        raise ConfigError(
            f"the trace has blocks of {size} tokens, the plan of {plan.block_size}; give --block-size {size}"
        )
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    settings = {name: getattr(plan, name) for name in names} | {"num_gpu_blocks_override": plan.num_blocks}
    return simulate(fit.fit([recording], trace), settings, load_of(recording))


def _figures(served: "Simulated") -> dict[str, Any]:
    from vllm_lite.tools.simulate.variants import without_lists

    return without_lists(served.figures)


def _print_load(served: "Simulated") -> None:
    from vllm_lite.tools.simulate.variants import rows

    print("\nThe recorded requests, with these sizes and the times of the recorded steps:")
    for line in rows([served._replace(settings={"simulated": "plan"})]):
        print(line)


def _print(plan: CapacityPlan) -> None:
    for name, value, remark in _rows(plan):
        print(f"  {name:<26} {value:>14}  {remark}".rstrip())
    if plan.fits:
        print(f"\nIt fits. {plan.command}")
    else:
        print("\nIt does not fit: " + "; ".join(plan.problems) + ".")
        if plan.advice:
            print("Possible with one of\n" + "\n".join(f"  {line}" for line in plan.advice))


def _rows(plan: CapacityPlan) -> list[tuple[str, str, str]]:
    is_gpu, tp = plan.device == "cuda", plan.tensor_parallel_size
    of_ranks = "" if tp == 1 else ", of the first rank" if is_gpu else f", of {tp} ranks"
    per_token = f"{plan.kv_bytes_per_token_beyond_windows / 1024:.1f} KiB beyond its windows"
    windowed = plan.kv_bytes_per_token_beyond_windows != plan.kv_bytes_per_token
    size = describe_parameters(plan.num_parameters, plan.active_parameters)
    rows = [
        ("model", plan.model, f"{plan.architecture}, {size} parameters"),
        ("memory", _size(plan.memory_bytes), _memory(plan)),
        ("weights", _size(plan.weights_bytes), f"{plan.quantization or plan.dtype}{of_ranks}"),
        ("activations", _size(plan.activations_bytes), f"estimate, {plan.max_num_batched_tokens} tokens in a step"),
    ]
    if plan.adapter_bytes:
        rows.append(("adapters", _size(plan.adapter_bytes), "of the largest rank, on every layer"))
    if plan.active_parameters < plan.num_parameters:
        rows.insert(3, ("  read for one token", _size(plan.active_weights_bytes), "weights of the whole model"))
    if plan.graph_bytes:
        rows.append(("CUDA graphs", _size(plan.graph_bytes), f"up to {plan.max_num_seqs} sequences"))
    rows.append(("processes", _size(plan.outside_bytes), "estimate"))
    if plan.block_bytes:
        each = f"{plan.kv_bytes_per_token / 1024:.1f} KiB"
        blocks = f"{plan.num_blocks:,} blocks of {plan.block_size} tokens{of_ranks}"
        rows.append(("KV cache", _size(plan.kv_cache_bytes), blocks))
        rows.append(("  of one token", each, per_token if windowed else plan.kv_cache_dtype))
        rows.append(("  tokens", f"{plan.kv_tokens:,}", ""))
    rows += [
        ("longest request", f"{plan.max_model_len:,}", f"tokens, of the model's {plan.max_position_embeddings:,}"),
        ("such requests at once", f"{plan.concurrent_requests:,}", f"in steps of up to {plan.max_num_seqs}"),
        ("longest that could fit", f"{plan.largest_max_model_len:,}", "tokens, with all of the memory"),
    ]
    if plan.num_state_slots:
        states = f"{plan.num_state_slots:,} slots of {_size(plan.state_bytes)}"
        rows.append(("recurrent states", _size(plan.num_state_slots * plan.state_bytes), states))
    if plan.num_host_blocks:
        swap, holds = plan.num_host_blocks * plan.block_bytes, f"{plan.num_host_blocks:,} blocks"
        if plan.num_host_states:
            swap += plan.num_host_states * plan.state_bytes
            holds += f", {plan.num_host_states:,} states"
        rows.append(("swap space", _size(swap), holds))
    if plan.disk is not None:
        rows += _disk_rows(plan.disk)
    return rows + [_rank_row(rank) for rank in plan.ranks]


def _disk_rows(disk: DiskPlan) -> list[tuple[str, str, str]]:
    """Rows on the disk's free space and rates, and its warnings."""
    held = f"the KV of {disk.tokens:,} tokens, on {disk.kind}, {_size(disk.free_bytes)} free"
    rows = [("KV on disk", _size(disk.size_bytes), held)]
    if disk.read_bytes_per_s:
        written = f"measured; {disk.write_bytes_per_s / 1e6:,.0f} MB/s written"
        rows.append(("  read", f"{disk.read_bytes_per_s / 1e6:,.0f} MB/s", written))
    return rows + [("  note", "", warning) for warning in disk.warnings]


def _memory(plan: CapacityPlan) -> str:
    if plan.device == "cpu":
        return "of the machine, for all ranks" if plan.ranks else ""
    gpus = f" of {plan.tensor_parallel_size}" if plan.ranks else ""
    return f"of a GPU{gpus}, {_size(plan.usable_bytes)} to use"


def _rank_row(rank: RankPlan) -> tuple[str, str, str]:
    """A row with the weights and KV cache of one rank, and its part of the model."""
    heads = f"{rank.num_heads} head{'s' * (rank.num_heads > 1)} with {rank.num_kv_heads} KV"
    tokens = f"tokens {rank.vocabulary[0]:,} to {rank.vocabulary[1] - 1:,}"
    return (
        f"rank {rank.rank}",
        _size(rank.weights_bytes),
        f"weights, KV cache {_size(rank.kv_cache_bytes)}; {heads}, {tokens}",
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.2f} MiB"
