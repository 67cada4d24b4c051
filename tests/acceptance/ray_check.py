"""Checks the engine on a Ray cluster of three nodes that it starts on this machine, on the loopback interface only.

    python -m tests.acceptance.ray_check [--only executor,...]

packed     TP 2 on one node gives the tokens of one worker
executor   TP 2 over two nodes gives the tokens of one worker; a node is killed under load: streams go on, on the third
disk       of two engines, each on a node of its own, the second finds in their common directory what the first computed
"""

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # so that Ray takes the loopback interface for the node's

import psutil
from ray.cluster_utils import Cluster

from tests.acceptance.named_checks import check, run
from vllm_lite import LLM
from vllm_lite.client.prompt import TokensPrompt
from vllm_lite.protocol.params import SamplingParams

LOOPBACK = "127.0.0.1"
PROMPTS = [f"{place} times Once upon a time" for place in range(6)]
MAX_TOKENS = 400
NODE_BYTES = 160 << 20


@contextmanager
def cluster(num_nodes: int, cpus: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster with a head without CPUs and `num_nodes` nodes with some; this process and its children find it by
    RAY_ADDRESS."""
    size = {"object_store_memory": NODE_BYTES, "node_ip_address": LOOPBACK, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **size})
    os.environ["RAY_ADDRESS"] = made.address
    try:
        yield made, [made.add_node(num_cpus=cpus, **size) for _ in range(num_nodes)]
    finally:
        del os.environ["RAY_ADDRESS"]
        made.shutdown()


def params(max_tokens: int = MAX_TOKENS) -> list[SamplingParams]:
    made = range(len(PROMPTS))
    return [SamplingParams(temperature=0.8, seed=n, max_tokens=max_tokens, ignore_eos=True) for n in made]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params(), use_tqdm=False)]


def check_executor() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 1024, "cpu_threads": 1}
    with LLM(**settings) as llm:
        alone = tokens(llm)
    with (
        cluster(num_nodes=2) as (made, nodes),
        LLM(**settings, tensor_parallel_size=2, distributed_executor_backend="ray", ready_timeout_s=300.0) as llm,
    ):
        began_s = time.monotonic()
        found = tokens(llm)
        took_s = time.monotonic() - began_s
        check(found == alone, f"2 ranks on 2 nodes give the tokens of one, in {took_s:.1f} s")
        third = made.add_node(num_cpus=1, object_store_memory=NODE_BYTES, node_ip_address=LOOPBACK)
        print("a third node has come:", third.unique_id[:8], flush=True)
        kill = threading.Timer(0.35 * took_s, kill_node, (nodes[1],))
        kill.start()
        began_s = time.monotonic()
        found = tokens(llm)
        check(found == alone, "a node is killed under load: all streams end with the same tokens")
        stats = llm.stats()
        print(
            f"took {time.monotonic() - began_s:.1f} s, undisturbed {took_s:.1f} s; without workers {stats.lost_s:.1f} s"
        )
        check(sum(stats.restarts.values()) == 1, f"one group was replaced: {stats.restarts}")
        check(stats.recovered_requests == len(PROMPTS), "every request went on with other workers")


def kill_node(node: Any) -> None:
    """Kill a node as by a power failure: the raylet and all processes that it has started."""
    (raylet,) = [psutil.Process(info.process.pid) for info in node.all_processes["raylet"]]
    family = [raylet, *raylet.children(recursive=True)]
    print(f"kill -9 of the raylet {raylet.pid} and of {len(family) - 1} processes below it", flush=True)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)


def check_packed() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 1024, "cpu_threads": 1}
    with LLM(**settings) as llm:
        alone = tokens(llm)
    with (
        cluster(num_nodes=1, cpus=2),
        LLM(**settings, tensor_parallel_size=2, distributed_executor_backend="ray", ready_timeout_s=300.0) as llm,
    ):
        began_s = time.monotonic()
        found = tokens(llm)
        check(found == alone, f"2 ranks on one node, over shared memory, in {time.monotonic() - began_s:.1f} s")


def check_disk() -> None:
    """Check the disk cache of two engines; nodes of one machine share its file system."""
    settings: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 512, "cpu_threads": 1}
    settings |= {"tensor_parallel_size": 2, "ready_timeout_s": 300.0}
    prompt = [5 + 7 * place % 2000 for place in range(300)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    num_keys = (len(prompt) + 19) // 16

    def ask(llm: LLM) -> tuple[list[int], int]:
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0

    def until_known(llm: LLM) -> None:
        deadline_s = time.monotonic() + 60.0
        while (stats := llm.stats()).num_stored_keys < num_keys or stats.num_writing_blocks:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{stats.num_stored_keys} of {num_keys} blocks are found after a minute")
            time.sleep(0.05)

    with tempfile.TemporaryDirectory() as folder, cluster(num_nodes=2, cpus=2):
        ray = {**settings, "distributed_executor_backend": "ray", "kv_cache_dir": f"{folder}/kv"}
        with LLM(**ray) as first, LLM(**ray) as second:
            tokens, cached = ask(first)
            check(cached == 0, "the first engine computes")
            until_known(first)
            until_known(second)
            check(ask(second) == (tokens, 288), "the second engine finds all of it, on another node")
        with LLM(**settings, kv_cache_dir=f"{folder}/kv") as alone:
            until_known(alone)
            check(ask(alone) == (tokens, 288), "and so does an engine beside Ray")


CHECKS: dict[str, Callable[[], None]] = {
    "executor": check_executor,
    "packed": check_packed,
    "disk": check_disk,
}


if __name__ == "__main__":
    sys.exit(run(__doc__, CHECKS))
