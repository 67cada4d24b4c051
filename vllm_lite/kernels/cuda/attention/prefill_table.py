"""Selects prompts for torch's FlashAttention, from a table measured on this machine, if there is one.

`scripts/gpu_check` measures prompts of several lengths, and chunks after prefixes, with this package's kernel and
torch's attention, and stores the results in the folder of compiled kernels. A worker on such a device, with the same
torch version, looks up the largest measured size up to the actual one, and uses the faster way. Without a table, all
prompts use this package's kernel.

cuDNN's attention is not used: torch makes a plan for each new shape, which takes 0.4 s, and a server gets new shapes at
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
"""Backends of torch's scaled_dot_product_attention, for whole prompts."""
GATHERED = "varlen"
"""The alternative for chunks after a prefix: varlen.py."""
LEAST_GAIN = 0.95
"""A library is used if it takes less than this fraction of our time: each length of prompts costs the host a launch and
a copy."""

logger = log.get(__name__)


@dataclass(frozen=True)
class Measured:
    """Times of one length and shape."""

    dtype: str  # "bfloat16"
    head_size: int
    group: int  # query heads per KV head
    num_tokens: int
    us: dict[str, float]  # microseconds by way
    num_before: int = 0  # tokens of the prefix before the chunk

    def best(self) -> str | None:
        """The library to use, None for this package's kernel."""
        ours = self.us.get(OURS)
        others = {way: us for way, us in self.us.items() if way in (LIBRARIES, (GATHERED,))[self.num_before > 0]}
        way = min(others, key=others.__getitem__, default=None)
        return way if way is not None and ours is not None and others[way] < LEAST_GAIN * ours else None


class PrefillTable:
    """Measurements of one device."""

    def __init__(self, measured: Iterable[Measured] = ()) -> None:
        self._measured = sorted(measured, key=lambda one: (one.num_tokens, one.num_before))

    def ways(self, dtype: torch.dtype, head_size: int, group: int) -> list[tuple[int, str | None]]:
        """(minimum tokens, way) of prompts for layers of this shape, ascending; None: this package's kernel."""
        found = self._of(dtype, head_size, group)
        return [(one.num_tokens, one.best()) for one in found if one.num_before == 0]

    def behind(self, dtype: torch.dtype, head_size: int, group: int) -> list[tuple[int, int, bool]]:
        """Measured chunks, ascending: tokens, tokens before them, and whether gathering those pays off."""
        found = self._of(dtype, head_size, group)
        return [(one.num_tokens, one.num_before, one.best() is not None) for one in found if one.num_before > 0]

    def _of(self, dtype: torch.dtype, head_size: int, group: int) -> list[Measured]:
        shape = str(dtype).removeprefix("torch."), head_size, group
        return [one for one in self._measured if (one.dtype, one.head_size, one.group) == shape]


def path_for(device: str, folder: Path | None = None) -> Path:
    """Path of the table for a kind of device."""
    name = "".join(c if c.isalnum() else "-" for c in device).strip("-").lower()
    return (folder or cache_folder()) / f"prefill-{name}.json"


def save(path: Path, measured: Iterable[Measured]) -> None:
    """Write a table, replacing the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"torch": torch.__version__, "measured": [asdict(one) for one in measured]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> PrefillTable:
    """The table; an empty one, with a log message, if there is no usable one."""
    try:
        content: dict[str, Any] = json.loads(read_bounded(path))
        if content["torch"] != torch.__version__:
            logger.info("%s is of torch %s: measure again with scripts/gpu_check", path, content["torch"])
            return PrefillTable()
        return PrefillTable(Measured(**one) for one in content["measured"])
    except FileNotFoundError:
        return PrefillTable()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a table of prefill times (%s): it is ignored", path, error)
        return PrefillTable()


def of_device(device: torch.device) -> PrefillTable:
    """The table of this device; an empty one if there is none."""
    return load(path_for(torch.cuda.get_device_name(device))) if device.type == "cuda" else PrefillTable()
