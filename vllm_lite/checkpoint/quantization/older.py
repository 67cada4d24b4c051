"""Files beside config.json in which tools described a quantization before config.json did."""

from pathlib import Path
from typing import Any

from vllm_lite.checkpoint.typed_json import read_json
from vllm_lite.errors import ModelError

OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""The file -> the quant_method that it is for, if it says none."""


def older_quantization(folder: Path) -> dict[str, Any] | None:
    """The quantization_config that such a file is; None: there is none. Raises ModelError for a damaged one."""
    for name, method in OLDER_FILES.items():
        if (folder / name).exists():
            return {"quant_method": method} | read_json(folder / name, _as_object)
    return None


def _as_object(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ModelError(f"it holds {type(raw).__name__}; it must be an object")
    return raw
