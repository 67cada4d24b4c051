"""Serve one small model of every family as `vllm-lite serve` does it, as processes, and hold it to transformers.

    python -m tests.acceptance.families_served
    python -m tests.acceptance.families_served --only gemma --checks tokens,worker

For each family a server in float32 answers completions, streams, chats, forms and forks, has its worker and then its
engine killed in a stream, and its trace is decided again. Others follow: two ranks, n-gram drafts, eager steps beside
`plan`, int8, bfloat16, transformers' code. A cell is "ok", "-" where there is nothing to check, "no" where the server
says by name that it cannot, or "FAIL", with a sentence below. Exit status: 0 if all held, 1 if something did not.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.acceptance import families_served_checks as checks
from tests.acceptance.families_served_checks import Subject, Unexpected
from tests.e2e.reference import TIE, Reference, make_prompts
from tests.families import through_transformers
from tests.families.all import VARIANTS
from tests.families.variant import Variant
from tests.http_server import Server, serving
from vllm_lite.models.registry import MODELS

Check = Callable[[Subject, Server], str]
USUAL = ("--dtype", "float32", "--cpu-threads", "1", "--log-level", "debug")
SMALL = ("--num-gpu-blocks-override", "400", *USUAL)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN = [
    Variant("llama", "LlamaConfig", "LlamaForCausalLM", HEADS | {"head_dim": 16}),
    Variant("qwen3", "Qwen3Config", "Qwen3ForCausalLM", HEADS | {"head_dim": 32}),
]
FOREIGN = ("helium", "nemotron", "apertus")
"""Families of the transformers backend: an interleaved rope, LayerNorm, an activation with weights."""
REFUSALS = {
    "ranks": ("transformers has no plan",),
    "other": (
        "cannot be served through transformers",
        "has no language model for",
        "supported are full_attention and sliding_attention",
        "merged weights",
        "latent attention",
    ),
}
"""Column that a model may lack -> beginnings of the server's refusals."""


@dataclass(frozen=True)
class Kind:
    """One server, and the checks that it gets."""

    flags: Sequence[str]
    columns: dict[str, Check]
    native_only: bool = False
    records: bool = False


FIRST: tuple[Check, ...] = (
    checks.models,
    checks.tokens,
    checks.logprobs,
    checks.stream,
    checks.chat,
    checks.samples,
    checks.regex,
)
FIRST += (checks.schema, checks.prefix, checks.fork, checks.worker, checks.engine, checks.recorded, checks.replay)
KINDS = [
    Kind(SMALL, {check.__name__: check for check in FIRST}, records=True),
    Kind(("-tp", "2", *SMALL), {"ranks": checks.same_long}),
    Kind(("--speculative-config", NGRAM, "--disable-adaptive-drafts", *SMALL), {"ngram": checks.ngram}),
    Kind(
        ("--enforce-eager", "--cpu-kvcache-space", "0.05", *USUAL),
        {"eager": checks.same_long, "plan": checks.plan},
    ),
    Kind(("--quantization", "int8", *SMALL), {"int8": checks.int8}),
    Kind((*SMALL, "--dtype", "bfloat16"), {"bf16": checks.bfloat16}),
    Kind(("--model-impl", "transformers", *SMALL), {"other": checks.other}, native_only=True),
]
COLUMNS = [*(name for kind in KINDS for name in kind.columns), "beyond"]
WIDTH = max(map(len, COLUMNS)) + 1


def subjects_of() -> list[Variant]:
    """One variant of each native architecture, and some of transformers' backend."""
    chosen: dict[str, Variant] = {}
    for variant in [*PLAIN, *VARIANTS]:
        chosen.setdefault(variant.model, variant)
    natives = [variant for model, variant in chosen.items() if model in MODELS]
    foreign = [variant for variant in through_transformers.VARIANTS if variant.name in FOREIGN]
    return natives + foreign


@contextmanager
def made(variant: Variant) -> Iterator[Subject]:
    """The variant's checkpoint, and transformers' answer to a prompt without ties."""
    with tempfile.TemporaryDirectory(prefix="vl") as folder:
        path = variant.make(Path(folder) / variant.name)
        reference = Reference(path)
        cases = map(reference.generate, make_prompts([45] * 20))
        case = next((case for case in cases if min(case.margins) > TIE), None)
        if case is None:
            raise Unexpected("all prompts come to a tie")
        yield Subject(variant.name, path, case, reference)


def serve(subject: Subject, kind: Kind, wanted: Sequence[str]) -> dict[str, str]:
    """The cells of one server."""
    named = [name for name in kind.columns if name in wanted]
    if not named or (kind.native_only and not subject.native):
        return dict.fromkeys(named, "-")
    cells: dict[str, str] = {}
    with ExitStack() as stack:
        flags = [str(subject.path), *kind.flags]
        if kind.records:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vl"))
            flags += ["--record", str(Path(folder) / "trace")]
        server = stack.enter_context(serving(*flags, ready=False))
        try:
            server.wait_for("Try:")
        except AssertionError as error:
            sentences = [says for name in named for says in REFUSALS.get(name, ())]
            refused = any(says in server.output for says in sentences) and server.wait() == 2
            return dict.fromkeys(named, "no" if refused else f"the server did not start: {str(error)[-400:]}")
        for name in named:
            cells[name] = attempt(lambda name=name: kind.columns[name](subject, server))  # type: ignore[misc]
    return cells


def attempt(run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_variant(variant: Variant, wanted: Sequence[str]) -> dict[str, str]:
    """All cells of a variant."""
    with made(variant) as subject:
        cells: dict[str, str] = {}
        for kind in KINDS:
            cells |= serve(subject, kind, wanted)
        if "beyond" in wanted:
            cells["beyond"] = attempt(lambda: checks.beyond(subject))
        return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--checks", default="", help=f"only these, with commas between them: {','.join(COLUMNS)}")
    args = parser.parse_args()
    wanted = args.checks.split(",") if args.checks else COLUMNS
    if unknown := set(wanted) - set(COLUMNS):
        parser.error(f"--checks: {', '.join(sorted(unknown))} is none of {', '.join(COLUMNS)}")
    transformers.logging.disable_progress_bar()
    variants = [variant for variant in subjects_of() if args.only in variant.name]
    if not variants:
        parser.error(f"--only {args.only} is in none of {', '.join(variant.name for variant in subjects_of())}")
    print(" " * 26 + "".join(f"{name:{WIDTH}}" for name in wanted), flush=True)
    failed = 0
    for variant in variants:
        began_s = time.monotonic()
        try:
            cells = check_variant(variant, wanted)
        except Unexpected as error:
            cells = {wanted[0]: str(error)}
        shown = {name: text if text in ("ok", "-", "no") else "FAIL" for name, text in cells.items()}
        took_s = time.monotonic() - began_s
        print(f"{variant.name:26}" + "".join(f"{shown.get(name, ''):{WIDTH}}" for name in wanted) + f"{took_s:5.0f} s")
        for name, text in cells.items():
            if shown[name] == "FAIL":
                print(f"    {variant.name}, {name}: {text[:1000]}")
        sys.stdout.flush()
        failed += "FAIL" in shown.values()
    print(f"{len(variants)} variants, {failed} of them with a failure")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
