"""The checkpoint of a plan: its config.json and headers, and whether its model is supported."""

import subprocess
import sys
from pathlib import Path

import msgspec

from vllm_lite.checkpoint import hub
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.eagle_head import read_eagle
from vllm_lite.checkpoint.fitting import check_settings
from vllm_lite.checkpoint.gemma4_assistant import is_assistant, read_assistant
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint
from vllm_lite.config import DEMO_MODEL, EngineConfig, demo_folder
from vllm_lite.errors import ConfigError, ModelError

MODULE = "vllm_lite.models.examination"
PATIENCE_S = 120.0
"""Timeout of the check: importing transformers takes seconds, a step without weights a moment."""


def load(config: EngineConfig) -> Checkpoint:
    """Read config.json and the headers of the weights (only these for a hub id), also of a draft model.

    Raises ModelError or ConfigError, as `serve` does, for a model that is not supported, or not with these settings.
    """
    checkpoint, speculation = _load(config), config.speculative_config
    if speculation is None or speculation.model is None:
        return checkpoint
    if speculation.method == "eagle3":
        folder = hub.local_folder(hub.HubSource(speculation.model, None, config.download_dir), what="model")
        head = Checkpoint(read_eagle(folder).spec, read_headers(Path(folder)))
        return msgspec.structs.replace(checkpoint, drafter=head)
    if not hub.is_hub_id(speculation.model) and is_assistant(speculation.model):
        drafter = Checkpoint(read_assistant(speculation.model).spec, read_headers(Path(speculation.model)))
        return msgspec.structs.replace(checkpoint, drafter=drafter)
    drafter = _load(msgspec.structs.replace(EngineConfig(), model=speculation.model, model_impl="native"))
    return msgspec.structs.replace(checkpoint, drafter=drafter)


def _load(config: EngineConfig) -> Checkpoint:
    if config.model == DEMO_MODEL:
        folder = Path(demo_folder())
        return Checkpoint(load_spec(folder, config.model_impl, config.pooling), read_headers(folder))
    source = hub.HubSource(config.model, config.revision, config.download_dir)
    if hub.is_hub_id(config.model) and source.label is not None:
        raise ModelError(f"{config.model}: a plan needs the header of the GGUF file; download it and give its path")
    folder = Path(hub.local_folder(source, what="config"))
    spec = load_spec(folder, config.model_impl, config.pooling)
    check_settings(config, spec)
    if spec.implementation == "transformers":
        check_implementation(config, folder)
    try:
        return Checkpoint(spec, read_headers(folder))
    except ModelError:
        if not hub.is_hub_id(config.model):
            raise
    return Checkpoint(spec, hub.remote_headers(source))


def check_implementation(config: EngineConfig, folder: Path) -> None:
    """Raise the ModelError or ConfigError with which a worker of `serve` refuses the model in `folder`."""
    given = {name: getattr(config, name) for name in EngineConfig.__struct_fields__}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", MODULE],
            input=msgspec.json.encode(EngineConfig(**given | {"model": str(folder)})),
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{folder}: whether it can be served was not found out within {PATIENCE_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        why = next((line for line in reversed(lines) if line.strip()), f"exit status {done.returncode}")
        raise ModelError(f"{folder}: whether it can be served could not be found out: {why}")
    answer = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, str])
    if answer:
        raise (ConfigError if answer["kind"] == "config" else ModelError)(answer["error"])
