"""Benchmarks of single parts of the engine, for its developers: `python benchmarks COMMAND`.

commands.py               the commands and their flags
simulated.py              the engine core alone, with simulated workers and a virtual clock
startup.py                from the command `serve` to its first token
kernels.py                the native kernels against memory's speed and torch
kernels_attention.py      paged attention and cache writes
kernels_experts.py        layers of experts
kernels_fused.py          small operations and the sampler
kernels_in_turn.py        two builds of the native library in turn, in one process
kernels_linear.py         linear layers
kernels_masks.py          bitmasks on logits
kernels_ranks.py          the all-reduce of two ranks
kernels_timing.py         how their times are taken, and the speed of memory
step.py                   where the time of a decode step goes
step_engine.py            the engine's process with a ledger
step_worker.py            the worker's
ledger.py                 wraps functions from outside and charges their time to parts of a step
"""

import os
from pathlib import Path


def child_path() -> dict[str, str]:
    """The environment variable by which a child process finds this package."""
    folders = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
