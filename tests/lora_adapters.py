"""LoRA adapters made with PEFT over tiny checkpoints, and the checkpoints that they make when they are merged."""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
ALL_LINEAR = "all-linear"


def quiet(function: F) -> F:
    """`function` without PEFT's warnings about transformers and about our unusual settings."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]


@quiet
def make_adapter(
    base: Path, path: Path, targets: str | Sequence[str] = ALL_LINEAR, *, seed: int = 0, rank: int = 4, **options: Any
) -> Path:
    """Write an adapter for the checkpoint `base` to the folder `path`, with random matrices, and return it. B is not
    zero, so that it changes outputs. Text as targets is read by PEFT: "all-linear", or a regular expression."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapt(model, targets, seed=seed, rank=rank, **options).save_pretrained(str(path))
    return path


@quiet
def adapt(model: Any, targets: str | Sequence[str], *, seed: int = 0, rank: int = 4, **options: Any) -> Any:
    """Put such an adapter into a model, which `unload()` of what is returned takes out again."""
    import torch
    from peft import LoraConfig, get_peft_model

    target: Any = targets if isinstance(targets, str) else list(targets)
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, target_modules=target, lora_alpha=2 * rank, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.15)
    return adapted


@quiet
def merge(base: Path, adapter: Path, path: Path) -> Path:
    """Write the checkpoint `base` with the adapter in its weights, by PEFT, to the folder `path`, and return it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.save_pretrained(path)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


def change_config(adapter: Path, changes: Mapping[str, Any]) -> Path:
    """Change keys of an adapter's config, and return it."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(changes)))
    return adapter
