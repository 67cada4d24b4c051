"""Facts from a model's files: its implementation, chat template, formats of tool calls and reasoning, sampling
defaults."""

from collections.abc import Iterator
from pathlib import Path

from vllm_lite.tools.doctor.checks import Line


def implementation(folder: str) -> Iterator[Line]:
    """Report the architecture of the model in `folder` and its implementation with --model-impl auto."""
    from vllm_lite.checkpoint.config_json import load_spec
    from vllm_lite.config import EngineConfig
    from vllm_lite.errors import ConfigError, ModelError
    from vllm_lite.tools.plan_checkpoint import check_implementation

    try:
        spec = load_spec(folder)
    except ModelError as error:
        yield Line("FAIL", "model", str(error), "correct the file, or give the folder of a checkpoint")
        return
    if spec.implementation == "native":
        yield Line("OK", "model", f"{spec.architecture}: native, {spec.size()} parameters")
        return
    try:
        check_implementation(EngineConfig(), Path(folder))
    except ConfigError as error:  # a package is missing
        yield Line("FAIL", "model", f"{spec.architecture}: {error}", "pip install 'vllm_lite[transformers]'")
    except ModelError as error:
        yield Line("FAIL", "model", f"{spec.architecture}: {error}", "serve a checkpoint of another architecture")
    else:
        yield Line("OK", "model", f"{spec.architecture}: transformers, {spec.size()} parameters")


def _instead_of_text(folder: str) -> str | None:
    """The output of a model that generates no text; None if it does, or cannot be read."""
    from vllm_lite.checkpoint.config_json import load_spec
    from vllm_lite.errors import ModelError

    try:
        pooling = load_spec(folder).pooling
    except ModelError:  # `implementation` says so
        return None
    if pooling is None or pooling.generates:
        return None
    return "vectors" if pooling.head is None else "scores"


def chats(folder: str) -> Iterator[Line]:
    """Report the template, formats and sampling defaults of the model in `folder` without flags."""
    from vllm_lite.client.generation_config import generation_defaults
    from vllm_lite.client.text.templates.template_source import TemplateSource
    from vllm_lite.client.text.tokenizer import Tokenizer
    from vllm_lite.errors import ModelError
    from vllm_lite.server.openai.formats import Formats, architectures_of

    if not Path(folder).exists():  # `implementation` says so
        return
    if (made := _instead_of_text(folder)) is not None:
        yield Line("OK", "chats", f"none: the model makes {made}, and no text")
        return
    try:
        tokenizer, template = Tokenizer.load(folder), TemplateSource.load(folder)
        source = None if template is None else template.texts
        defaults = generation_defaults(folder)
        formats = Formats.of(folder, tokenizer, (None, None), source, architectures_of(folder))
    except ModelError as error:
        yield Line("FAIL", "model", str(error), "correct the file, or get it again")
        return
    if template is None:
        yield Line("WARN", "chat template", "there is none", "give one with --chat-template to serve chats")
    else:
        yield Line("OK", "chat template", template.name)
    for name, found, flag in (
        ("tool calls", formats.calls, "--tool-call-parser"),
        ("reasoning", formats.reasoning, "--reasoning-parser"),
    ):
        advice = "" if found else f"name one with {flag} if the model has it"
        yield Line("OK", name, found or "no format is known; what a model writes of it is content", advice)
    yield Line("OK", "formats chosen", formats.choice.why)
    yield from _ends(folder)
    yield Line("OK", "sampling defaults", str(defaults))


def _ends(folder: str) -> Iterator[Line]:
    """Report the tokens that end an answer, and the file that defines each."""
    from vllm_lite.checkpoint.config_json import load_spec
    from vllm_lite.client.text.end_tokens import find_end_tokens, writes_text
    from vllm_lite.errors import ModelError

    try:
        spec = load_spec(folder)
        if not writes_text(spec):
            return
        found = find_end_tokens(folder, folder, spec, renders=True)
    except ModelError:  # `implementation` says so
        return
    shown = "; ".join(found.lines())
    if (problem := found.problem) is not None:
        advice = "name the right one in generation_config.json" if shown else "name one in generation_config.json"
        yield Line("WARN", "end tokens", f"{shown}. {problem}" if shown else problem, advice)
    else:
        yield Line("OK", "end tokens", shown)
