"""The description of the served model in Ollama's API."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_lite.client.text.templates import template_source
from vllm_lite.server.generation import LATEST, ServedModel
from vllm_lite.server.openai.formats import architectures_of
from vllm_lite.server.openai.prompts import PromptRenderer

NEVER = "9999-12-31T23:59:59Z"
"""Expiry time in answers: the model is never unloaded."""


@dataclass(frozen=True)
class OllamaModel:
    """Facts about the model that do not change while it is served. `template`: the chat template to show, "" for
    none."""

    served: ServedModel
    size_bytes: int
    modified_at: str
    details: dict[str, Any]
    capabilities: Sequence[str]
    template: str = ""

    @classmethod
    def of(cls, served: ServedModel, folder: str, prompts: PromptRenderer, template: str | None) -> "OllamaModel":
        """Read the checkpoint in `folder`, which may be a file."""
        place = Path(folder)
        paths = [place] if place.is_file() else sorted([*place.glob("*.safetensors"), *place.glob("*.gguf")])
        stats = [path.stat() for path in paths if path.is_file()]
        modified_s = max([each.st_mtime for each in stats], default=served.created)
        config = template_source.read_json(place / "config.json") if place.is_dir() else {}
        family = str(config.get("model_type") or next(iter(architectures_of(folder)), "unknown"))
        quantized = config.get("quantization_config")
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        details = {
            "parent_model": "",
            "format": "gguf" if any(path.suffix == ".gguf" for path in paths) else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": str(method or config.get("dtype") or config.get("torch_dtype") or "unknown"),
        }
        can = [
            ("completion", "generate" in served.formats.get("tasks", ["generate"])),
            ("embedding", "embed" in served.formats.get("tasks", [])),
            ("tools", prompts.shows_tools and served.formats.get("tool_call_format") is not None),
            ("thinking", served.formats.get("reasoning_format") is not None),
            ("insert", prompts.can_fill_in),
            ("vision", prompts.takes_images),
        ]
        size_bytes = sum(each.st_size for each in stats)
        when = datetime.fromtimestamp(modified_s, UTC).isoformat().replace("+00:00", "Z")
        return cls(served, size_bytes, when, details, [name for name, is_able in can if is_able], template or "")

    def name(self, wanted: str | None) -> str:
        """Return the model name for the answer. Raises ApiError for a model that is not served."""
        names = (*self.served.all_names, self.served.path)
        known = wanted if wanted in names or wanted is None else wanted.removesuffix(LATEST)
        return wanted if self.served.name(known) == known and wanted is not None else self.served.name(known)

    def entries(self) -> list[dict[str, Any]]:
        """Entries of the model list, one for each name; names without a tag get ":latest"."""
        return [
            {
                "name": tagged,
                "model": tagged,
                "modified_at": self.modified_at,
                "size": self.size_bytes,
                "digest": hashlib.sha256(f"{self.served.root}/{self.modified_at}".encode()).hexdigest(),
                "details": self.details,
            }
            for name in self.served.all_names
            for tagged in [name if ":" in name else name + LATEST]
        ]

    def running(self) -> list[dict[str, Any]]:
        more = {"expires_at": NEVER, "size_vram": self.size_bytes, "context_length": self.served.max_model_len}
        return [{**entry, **more} for entry in self.entries()]

    def shown(self) -> dict[str, Any]:
        """The answer of /api/show."""
        family = self.details["family"]
        defaults = {name: value for name, value in self.served.defaults.items() if value is not None}
        return {
            "license": "",
            "modelfile": f"# served by vllm_lite\nFROM {self.served.names[0]}\n",
            "parameters": "\n".join(f"{name} {value}" for name, value in sorted(defaults.items())),
            "template": self.template,
            "details": self.details,
            "model_info": {"general.architecture": family, f"{family}.context_length": self.served.max_model_len},
            "capabilities": self.capabilities,
            "modified_at": self.modified_at,
        }
