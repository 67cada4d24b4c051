"""`vllm-lite bench serve`: its flags, checks and output."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lite.errors import ConfigError

if TYPE_CHECKING:
    from vllm_lite.tools.bench.serve import ServeOptions
    from vllm_lite.tools.bench.serve_datasets import DatasetOptions

BACKENDS = ("openai", "openai-chat", "vllm")
DATASETS = ("random", "sharegpt", "prefix_repetition", "custom", "chats", "agents")
METRICS = ("ttft", "tpot", "itl", "e2el")
NUM_PROMPTS = 1000
FIT_S = 60.0
SAMPLING: dict[str, tuple[type[int] | type[float], float | None]] = {
    "temperature": (float, 0.0),
    "top_p": (float, None),
    "top_k": (int, None),
    "min_p": (float, None),
    "frequency_penalty": (float, None),
    "presence_penalty": (float, None),
    "repetition_penalty": (float, None),
    "logprobs": (int, None),
}
"""Fields of a request's body, with their types and defaults; None is not sent."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    _add_target(parser.add_argument_group("server").add_argument)
    requests = parser.add_argument_group("requests").add_argument
    add_datasets(requests, f"{NUM_PROMPTS}, or what the server can do in about {FIT_S:g} s if that is less")
    _add_sampling(requests)
    load = parser.add_argument_group("load").add_argument
    add_load(load)
    load("--num-warmups", type=int, default=0, help="warm-up requests, not measured [0]")
    _add_results(parser.add_argument_group("results").add_argument)


def _add_target(add: Callable[..., object]) -> None:
    add("--backend", "--endpoint-type", choices=BACKENDS, default="openai", help="which API; vllm is openai [openai]")
    add("--url", "--base-url", dest="base_url", metavar="URL", help="the server's address, instead of host and port")
    add("--host", default="127.0.0.1", help="[127.0.0.1]")
    add("--port", type=int, default=8000, help="[8000]")
    add("--endpoint", help="path of the API [/v1/completions, for openai-chat /v1/chat/completions]")
    add("--model", help="model to request; a folder is also the tokenizer [the server's first]")
    add("--served-model-name", help="model to request, if not --model")
    add("--tokenizer", help="folder with tokenizer.json; without it, random prompts are token ids")
    add("--header", action="append", default=[], metavar="NAME=VALUE", help="further HTTP header; repeatable")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add(
        "--request-timeout",
        type=float,
        default=6 * 3600.0,
        metavar="S",
        help="timeout of a request, in seconds [21600]",
    )


def add_datasets(add: Callable[..., object], num_prompts: str) -> None:
    """Add the flags of DatasetOptions; `num_prompts` describes the default number of requests."""
    add("--dataset-name", choices=DATASETS, default="random", help="[random]")
    add("--dataset-path", metavar="FILE", help="ShareGPT's JSON, or custom's JSON lines with `prompt`")
    add("--num-prompts", type=int, help=f"[{num_prompts}]")
    add("--seed", type=int, default=0, help="of prompts and arrivals [0]")
    add("--random-input-len", "--input-len", type=int, default=1024, help="tokens, without the prefix [1024]")
    add("--random-output-len", "--output-len", type=int, default=128, help="[128]")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by up to this fraction, below 1 [0]")
    add("--random-prefix-len", type=int, default=0, help="tokens of a common prefix of all prompts [0]")
    for name, value in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10), ("output-len", 128)):
        add(f"--prefix-repetition-{name}", type=int, default=value, help=f"[{value}]")
    add("--sharegpt-output-len", type=int, help="tokens [those of the conversation's answer]")
    add("--custom-output-len", type=int, default=256, help="for lines without output_tokens [256]")
    add("--chat-turns", type=int, help="requests of a conversation of chats [4] or agents [8]")
    add("--chat-prefix-len", type=int, help="tokens of a common prefix of all conversations [256, agents: 1500]")
    add("--chat-message-len", type=int, help="mean tokens of a message [64], or of a tool's result [250]")
    add("--chat-output-len", type=int, help="mean tokens of an answer [128, agents: 48]")
    add("--chat-wait", type=float, metavar="S", help="mean seconds from an answer to the next message [8, agents: 0.5]")


def _add_sampling(add: Callable[..., object]) -> None:
    add("--ignore-eos", action="store_true", help="always generate the requested number of tokens")
    for name, (kind, default) in SAMPLING.items():
        text = "[the server's]" if default is None else f"[{default:g}]"
        add(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    add("--extra-body", metavar="JSON", help="further fields of every request, as a JSON object")


def add_load(add: Callable[..., object]) -> None:
    """Add the flags for the times of requests."""
    add("--request-rate", type=float, default=float("inf"), help="requests a second [inf: all at once]")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evenly [1]")
    add("--max-concurrency", type=int, help="maximum concurrent requests [no limit]")


def _add_results(add: Callable[..., object]) -> None:
    add("--percentile-metrics", default=",".join(METRICS), help=f"which are shown [{','.join(METRICS)}]")
    add("--metric-percentiles", default="99", metavar="P,P", help="such as 50,90,99 [99]")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="count requests within limits: ttft:200")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with the lengths, times and texts of every request")
    add("--result-dir", default=".", metavar="FOLDER", help="[.]")
    add("--result-filename", metavar="FILE", help="[made of backend, rate, model and date]")
    add("--label", help="prefix of the file's name [the backend]")
    add("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="further entries of the JSON file")
    add("--plot", metavar="FILE.png", help="draw latencies, and throughput over time")
    add(
        "--simulated",
        metavar="FILE",
        help="print the same figures as `simulate` has them with this fitted file, and its errors",
    )
    add("--disable-tqdm", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Send requests to an OpenAI-compatible server, and show its latencies and throughput. Flags and results are named
    as in vLLM's benchmark."""
    from vllm_lite.tools import plotting
    from vllm_lite.tools.bench import serve, serve_plot, serve_result

    options, metrics, metadata = _options(arguments), _names(arguments), _pairs("metadata", arguments.metadata)
    if arguments.plot is not None:
        plotting.check(arguments.plot)
    compare = _comparison(arguments, options)
    done = serve.run(options)
    result = done.result
    if result["completed"]:
        print(serve_result.table(result, metrics, options.percentiles))
    if arguments.save_result or arguments.save_detailed or arguments.result_filename:
        place = Path(arguments.result_dir, arguments.result_filename or serve.file_name(result, arguments.label))
        serve.save({**metadata, **result}, str(place), detailed=arguments.save_detailed)
        print(f"result: {place}")
    if arguments.plot is not None:
        title = f"{result['model_id']}: {result['completed']} requests, {result['output_throughput']:.1f} tokens/s"
        serve_plot.plot(done.served, title, arguments.plot)
        print(f"plot: {arguments.plot}")
    if result["completed"]:
        for line in compare(result):
            print(line)
    if tokens := result["total_output_tokens"]:
        print(f"this client took {done.cpu_s:.2f} s of CPU time, {1e6 * done.cpu_s / tokens:.1f} us for each token")
    errors = [error for error in result["errors"] if error]
    if errors:
        print(f"vllm-lite: {len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
    return 0 if result["completed"] else 1


def _comparison(arguments: argparse.Namespace, options: "ServeOptions") -> Callable[[Mapping[str, Any]], Iterable[str]]:
    """A function that prints simulated figures beside measured ones; an empty one without --simulated. Raises
    ConfigError before the measurement if the load cannot be simulated."""
    if arguments.simulated is None:
        return lambda _: ()
    import msgspec

    from vllm_lite.tools.bench import serve
    from vllm_lite.tools.simulate import cost
    from vllm_lite.tools.simulate.load import LoadOptions, make_load
    from vllm_lite.tools.simulate.variants import RunOptions, comparison, simulate

    if 99.0 not in options.percentiles:
        raise ConfigError("--simulated compares the 99th percentiles; let --metric-percentiles have 99")
    fitted = cost.read(arguments.simulated)
    tokenizer = serve.load_tokenizer(options)

    def compare(result: Mapping[str, Any]) -> Iterable[str]:
        dataset = msgspec.structs.replace(options.dataset, num_prompts=result["num_prompts"])
        load = make_load(LoadOptions(dataset, options.request_rate, options.burstiness), tokenizer)
        done = simulate(fitted, {}, load, RunOptions(dataset.seed, options.max_concurrency))
        yield from comparison(done.figures, result)

    return compare


def _options(arguments: argparse.Namespace) -> "ServeOptions":
    """Raises ConfigError."""
    from vllm_lite.tools.bench.serve import ServeOptions

    dataset = dataset_options(arguments)
    sampling = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.ignore_eos:
        sampling["ignore_eos"] = True
    headers = _pairs("header", arguments.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers = {"Authorization": f"Bearer {key}", **headers}
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    given = {name: value for name, value in vars(arguments).items() if name in ServeOptions.__struct_fields__}
    changed = {
        "dataset": dataset,
        "fit_s": FIT_S if arguments.num_prompts is None else None,
        "base_url": arguments.base_url or f"http://{host}:{arguments.port}",
        "percentiles": percentiles_of(arguments.metric_percentiles),
        "goodput": _goodput(arguments.goodput),
        "sampling": sampling | _extra(arguments.extra_body),
        "headers": headers,
        "request_timeout_s": arguments.request_timeout,
        "show_progress": not arguments.disable_tqdm,
    }
    return ServeOptions(**{**given, **changed})


def dataset_options(arguments: argparse.Namespace) -> "DatasetOptions":
    """The options of the dataset. Raises ConfigError, also for an impossible load."""
    from vllm_lite.tools.bench.serve_datasets import DatasetOptions

    _check_ranges(arguments)
    lengths = {name: getattr(arguments, name) for name in DatasetOptions.__struct_fields__}
    return DatasetOptions(**{**lengths, "num_prompts": arguments.num_prompts or NUM_PROMPTS})


def _check_ranges(arguments: argparse.Namespace) -> None:
    for name, value in vars(arguments).items():
        is_length = name == "num_prompts" or name.endswith(
            ("_output_len", "_num_prefixes", "_input_len", "_message_len", "_turns")
        )
        if is_length and value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if (
            name.endswith(("_prefix_len", "_suffix_len", "_warmups", "_wait"))
            and value is not None
            and not 0 <= value < inf
        ):
            raise ConfigError(f"--{name.replace('_', '-')} must be a number of at least 0, got {value}")
        is_share = name in ("request_rate", "burstiness", "max_concurrency", "request_timeout")
        if is_share and value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}")
    if not 0 <= arguments.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {arguments.random_range_ratio:g}")
    if arguments.prefix_repetition_prefix_len + arguments.prefix_repetition_suffix_len < 1:
        raise ConfigError("prompts need tokens; give --prefix-repetition-prefix-len or --prefix-repetition-suffix-len")


def _names(arguments: argparse.Namespace) -> list[str]:
    names = [name for name in arguments.percentile_metrics.split(",") if name]
    if unknown := set(names) - set(METRICS):
        raise ConfigError(f"--percentile-metrics are some of {', '.join(METRICS)}, got {', '.join(sorted(unknown))}")
    return names


def percentiles_of(text: str) -> tuple[float, ...]:
    """Raises ConfigError."""
    try:
        values = tuple(float(word) for word in text.split(",") if word)
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles must be numbers like 50,90,99, got {text!r}") from error
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles lie between 0 and 100, got {text!r}")
    return values


def _goodput(words: list[str]) -> dict[str, float]:
    from vllm_lite.tools.bench.serve_result import GOODPUT_METRICS

    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--goodput must look like ttft:200 tpot:50, in milliseconds, got {word!r}") from error
        if name not in GOODPUT_METRICS or not limits[name] >= 0:
            raise ConfigError(f"--goodput takes {', '.join(GOODPUT_METRICS)} with milliseconds, got {word!r}")
    return limits


def _pairs(flag: str, words: list[str]) -> dict[str, str]:
    for word in words:
        if not word.partition("=")[1]:
            raise ConfigError(f"--{flag} must look like NAME=VALUE, got {word!r}")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _extra(text: str | None) -> dict[str, Any]:
    import msgspec

    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"--extra-body must be a JSON object ({error}), got {text!r}") from error
