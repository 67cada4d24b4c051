"""Prompts that go through torch's FlashAttention: a table that was measured on this machine, or none.

`scripts/gpu_check` measures prompts of several lengths, and chunks behind prefixes, by our kernel and by torch's
attention, and keeps what it found in the folder of the compiled kernels. A worker on such a device, with the same
torch, looks for the largest that was measured and is no larger than what it has, and takes the faster way of that.
Without a table all go through our kernel.

cuDNN's attention is no way: torch makes a plan for each new shape, which takes 0.4 s, and a server meets new shapes at
any time.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from vllm_lite.kernels.cuda.compiler import cache_folder
from vllm_lite.runtime import log
from vllm_lite.runtime.untrusted_files import read_bounded

OURS = "ours"
LIBRARIES = {"flash": SDPBackend.FLASH_ATTENTION}
"""Ways of torch's scaled_dot_product_attention, for prompts that come whole."""
GATHERED = "varlen"
"""The way of chunks behind a prefix that is not ours: varlen.py."""
LEAST_GAIN = 0.95
"""A library has to take less than this part of our time: each length of prompts costs the host a launch and a copy."""

logger = log.get(__name__)


@dataclass(frozen=True)
class Measured:
    """One length of one shape."""

    dtype: str  # "bfloat16"
    head_size: int
    group: int  # query heads of a KV head
    num_tokens: int
    us: dict[str, float]  # by way
    num_before: int = 0  # tokens of the prefix that these are a chunk behind

    def best(self) -> str | None:
        """The library that is worth it, if one is."""
        ours = self.us.get(OURS)
        others = {way: us for way, us in self.us.items() if way in (LIBRARIES, (GATHERED,))[self.num_before > 0]}
        way = min(others, key=others.__getitem__, default=None)
        return way if way is not None and ours is not None and others[way] < LEAST_GAIN * ours else None


class PrefillTable:
    """Measurements of one device."""

    def __init__(self, measured: Iterable[Measured] = ()) -> None:
        self._measured = sorted(measured, key=lambda one: (one.num_tokens, one.num_before))

    def ways(self, dtype: torch.dtype, head_size: int, group: int) -> list[tuple[int, str | None]]:
        """From how many tokens on prompts of such layers go which way: ascending; None: through our kernel."""
        found = self._of(dtype, head_size, group)
        return [(one.num_tokens, one.best()) for one in found if one.num_before == 0]

    def behind(self, dtype: torch.dtype, head_size: int, group: int) -> list[tuple[int, int, bool]]:
        """Chunks that were measured, ascending: tokens, tokens before them, and whether to gather those pays."""
        found = self._of(dtype, head_size, group)
        return [(one.num_tokens, one.num_before, one.best() is not None) for one in found if one.num_before > 0]

    def _of(self, dtype: torch.dtype, head_size: int, group: int) -> list[Measured]:
        shape = str(dtype).removeprefix("torch."), head_size, group
        return [one for one in self._measured if (one.dtype, one.head_size, one.group) == shape]


def path_for(device: str, folder: Path | None = None) -> Path:
    """File of the table of a kind of device."""
    name = "".join(c if c.isalnum() else "-" for c in device).strip("-").lower()
    return (folder or cache_folder()) / f"prefill-{name}.json"


def save(path: Path, measured: Iterable[Measured]) -> None:
    """Keep a table, in place of the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"torch": torch.__version__, "measured": [asdict(one) for one in measured]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> PrefillTable:
    """The table; an empty one, with a line in the log, where there is none that can be used."""
    try:
        content: dict[str, Any] = json.loads(read_bounded(path))
        if content["torch"] != torch.__version__:
            logger.info("%s is of torch %s: measure again with scripts/gpu_check", path, content["torch"])
            return PrefillTable()
        return PrefillTable(Measured(**one) for one in content["measured"])
    except FileNotFoundError:
        return PrefillTable()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is no table of prefill times (%s): it is left aside", path, error)
        return PrefillTable()


def of_device(device: torch.device) -> PrefillTable:
    """The table of this device; an empty one if there is none."""
    return load(path_for(torch.cuda.get_device_name(device))) if device.type == "cuda" else PrefillTable()
