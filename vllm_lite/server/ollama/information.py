"""The descriptions of models in Ollama's API."""

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


def iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")


def details_of(kind: str, family: str, quantization: str) -> dict[str, Any]:
    """The field `details` of a model whose files are of this kind."""
    return {
        "parent_model": "",
        "format": kind,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def entry_of(name: str, modified_at: str, size: int, digest_of: str, details: dict[str, Any]) -> dict[str, Any]:
    """An entry of /api/tags. A name without a tag gets ":latest"."""
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": modified_at,
        "size": size,
        "digest": hashlib.sha256(digest_of.encode()).hexdigest(),
        "details": details,
    }


def shown_of(  # noqa: PLR0913 - the fields of one answer
    name: str,
    details: dict[str, Any],
    context_length: int | None,
    capabilities: Sequence[str],
    modified_at: str,
    *,
    parameters: str = "",
    template: str = "",
) -> dict[str, Any]:
    """The answer of /api/show."""
    family = details["family"]
    length = {f"{family}.context_length": context_length} if context_length else {}
    return {
        "license": "",
        "modelfile": f"# served by vllm_lite\nFROM {name}\n",
        "parameters": parameters,
        "template": template,
        "details": details,
        "model_info": {"general.architecture": family, **length},
        "capabilities": list(capabilities),
        "modified_at": modified_at,
    }


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
        kind = "gguf" if any(path.suffix == ".gguf" for path in paths) else "safetensors"
        level = str(method or config.get("dtype") or config.get("torch_dtype") or "unknown")
        details = details_of(kind, family, level)
        can = [
            ("completion", "generate" in served.formats.get("tasks", ["generate"])),
            ("embedding", "embed" in served.formats.get("tasks", [])),
            ("tools", prompts.shows_tools and served.formats.get("tool_call_format") is not None),
            ("thinking", served.formats.get("reasoning_format") is not None),
            ("insert", prompts.filler is not None),
            ("vision", prompts.takes_images),
        ]
        size_bytes = sum(each.st_size for each in stats)
        return cls(
            served, size_bytes, iso(modified_s), details, [name for name, is_able in can if is_able], template or ""
        )

    def name(self, wanted: str | None) -> str:
        """Return the model name for the answer. Raises ApiError for a model that is not served."""
        names = (*self.served.all_names, self.served.path)
        known = wanted if wanted in names or wanted is None else wanted.removesuffix(LATEST)
        return wanted if self.served.name(known) == known and wanted is not None else self.served.name(known)

    def entries(self) -> list[dict[str, Any]]:
        """Entries of the model list, one for each name."""
        root = f"{self.served.root}/{self.modified_at}"
        names = self.served.all_names
        return [entry_of(name, self.modified_at, self.size_bytes, root, self.details) for name in names]

    def running(self) -> list[dict[str, Any]]:
        more = {"expires_at": NEVER, "size_vram": self.size_bytes, "context_length": self.served.max_model_len}
        return [{**entry, **more} for entry in self.entries()]

    def shown(self) -> dict[str, Any]:
        """The answer of /api/show."""
        defaults = {name: value for name, value in self.served.defaults.items() if value is not None}
        return shown_of(
            self.served.names[0],
            self.details,
            self.served.max_model_len,
            self.capabilities,
            self.modified_at,
            parameters="\n".join(f"{name} {value}" for name, value in sorted(defaults.items())),
            template=self.template,
        )
