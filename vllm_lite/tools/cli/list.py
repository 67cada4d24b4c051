"""List the models in the hub's cache: size, family, format, whether each fits this machine, when it was last read."""

import argparse
import json
import time
from typing import Any, NamedTuple

from vllm_lite.checkpoint.hub_cache import CachedModel, cached_models
from vllm_lite.errors import VllmLiteError
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load
from vllm_lite.tools.sizes import size_text

COLUMNS = ("name", "size", "family", "format", "fits", "last read", "commit")


class Fit(NamedTuple):
    """`fits` is None for a model that is not supported or cannot be read; `why` is the reason."""

    fits: bool | None
    why: str | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--download-dir", metavar="DIR", help="folder of downloads [huggingface_hub's own]")
    parser.add_argument("--json", action="store_true", help="print one list of objects")


def run(arguments: argparse.Namespace) -> int:
    rows = [row(model) for model in cached_models(arguments.download_dir)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no model is in the cache; vllm-lite pull ORG/REPO fetches one")
    else:
        _print(rows)
    return 0


def row(model: CachedModel) -> dict[str, Any]:
    """A model as printed by --json."""
    fit = fit_of(model)
    return {
        "name": model.name,
        "commit": model.commit,
        "path": str(model.path),
        "size_bytes": model.num_bytes,
        "family": model.facts.family,
        "format": model.facts.format,
        "quantization": model.facts.quantization,
        "context_length": model.facts.context_length,
        "is_whole": model.is_whole,
        "fits": fit.fits,
        "why": fit.why,
        "last_read": model.used_s or None,
    }


def fit_of(model: CachedModel) -> Fit:
    """Whether a model fits this machine with the default settings, computed as by `plan`."""
    if not model.is_whole:
        return Fit(None, "some of its files are missing: pull it again")
    try:
        config = PlanConfig.check({"model": str(model.path)})
        plan = make_plan(config, load(config))
    except VllmLiteError as error:
        return Fit(None, str(error))
    return Fit(plan.fits, None if plan.fits else "; ".join(plan.problems))


def _print(rows: list[dict[str, Any]]) -> None:
    lines = [tuple(map(str.upper, COLUMNS)), *map(_words, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for words in lines:
        print("  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip())


def _words(values: dict[str, Any]) -> tuple[str, ...]:
    used = values["last_read"]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used)) if used else "never"
    fits = {True: "yes", False: "no", None: "not served"}[values["fits"]] if values["is_whole"] else "not whole"
    form = f"{values['format']} {values['quantization']}"
    return values["name"], size_text(values["size_bytes"]), values["family"], form, fits, when, values["commit"][:12]
