"""Output tokens per second with each drafter and without drafts, on the same questions in turn.

    python benchmarks/speculation.py MODEL                 # a first answer, and the same one again
    python benchmarks/speculation.py MODEL --streams 8     # all questions at once, 24 of them, 8 at a time
    python benchmarks/speculation.py MODEL --quantization int8 --ways none self --first
    python benchmarks/speculation.py MODEL --ways none self draft_model --draft-model OTHER
    python benchmarks/speculation.py MODEL --chat-template FILE    # where the checkpoint has none; or --plain
    python benchmarks/speculation.py MODEL --random 3 --first      # prompts of random tokens, for synthetic weights
    python benchmarks/speculation.py MODEL --ways none mtp --odds 0.8 0.75 0.75 --most 3
    python benchmarks/speculation.py MODEL --peers DIR --llama MODEL.gguf SMALL.gguf --openvino FOLDER SMALL_FOLDER

All engines run at once, and each question goes to one after the other, so that a cell's speeds are measured within
seconds; the numbers in brackets are medians of the rounds' ratios. "again" repeats the question, so that drafts by
suffix know the first answer. The prefix cache is reset in between, so that no prompt is cheaper, and drafters do not
know the answers of other rounds. The last lines count answers with the same tokens as without drafts. Peers (in the
folder DIR made by runners/setup.sh) answer one stream, each with its own lookup, and with drafts of the smaller model.
With --odds, drafts are computed and then replaced by others that are right with these odds (runners/told_worker.py),
for shapes without real heads.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from runners.answering import Answer, Peer
from runners.told_worker import KEY_TOKENS, ODDS, TOKENS

from vllm_lite import LLM, RequestOutput, SamplingParams
from vllm_lite.client.engines import launch

QUESTIONS = {
    "prose": "Write a long story about a lighthouse keeper who finds a bottle with a letter.",
    "json": "List ten European capitals as JSON objects with the keys name, country and population.",
    "chat": "I have two free days in Lisbon. What should I see, and where should I eat?",
    "edit": "Repeat this text, with every 'we' replaced by 'they': When the storm came we closed the shutters, we lit "
    "the lamp and we waited. In the morning we went down to the beach, where we found a bottle, and in it a letter "
    "that we could not read. So we carried it home, and there we dried it by the stove until we saw words.",
    "code": "Write a Python class for a stack with push, pop, peek, size and a test for each of these methods.",
}
WAYS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "self": {"method": "self"},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}
BASE = "none"
RANDOM_LENGTH = 64
WAVES = 3
"""Requests for each stream, so that a new one starts when another has ended. Time with idle streams at the end does not
count."""
LOOKUPS, DRAFTS = (2, 10), (4, 16)
"""Numbers of drafts that peers are tried with: llama-cpp-python's advice for CPUs and its default, and llama.cpp's
default and a smaller number."""
OPENVINO_DRAFTS = 4
WARM_TOKENS = 40


class Engine(Protocol):
    def ask(self, prompts: list[list[int]], num_tokens: int, salt: str) -> tuple[float, list[Answer]]:
        """Seconds that all prompts took, and the answers. Drafters learn only from answers with the same salt."""


class Ours:
    def __init__(self, llm: LLM, streams: int) -> None:
        self.llm, self.streams = llm, streams

    def ask(self, prompts: list[list[int]], num_tokens: int, salt: str) -> tuple[float, list[Answer]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, cache_salt=salt
        )
        self.llm.reset_prefix_cache()
        before = self.llm.stats()
        began_s = time.monotonic()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took_s = busy_time(outputs, began_s, self.streams)
        after = self.llm.stats()
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        counts = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
        return took_s, [Answer(tokens[0], *counts), *map(Answer, tokens[1:])]


def busy_time(outputs: list[RequestOutput], began_s: float, streams: int) -> float:
    """Seconds that all tokens take at the rate up to the time when fewer requests than streams are left. With drafts
    some requests end sooner than others, and a server would then have new ones."""
    times = [(each.metrics.first_token_time or 0.0, each.metrics.finished_time or 0.0) for each in outputs]
    until_s = sorted(finished_s for _, finished_s in times)[len(outputs) - streams]
    shares = [(until_s - first_s) / max(finished_s - first_s, 1e-6) for first_s, finished_s in times]
    return (until_s - began_s) * len(outputs) / sum(min(1.0, max(0.0, share)) for share in shares)


class Theirs:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def ask(self, prompts: list[list[int]], num_tokens: int, salt: str) -> tuple[float, list[Answer]]:  # noqa: ARG002 (peers keep no answers)
        took_s, answer = self.peer.ask(prompts[0], num_tokens)
        return took_s, [answer]


class Figures:
    """Speeds of every cell by rounds, and numbers of answers equal to the expected ones."""

    def __init__(self, ways: list[str]) -> None:
        self.ways = ways
        self.speeds: dict[tuple[str, str, str], list[float]] = {}
        self.drafts: dict[str, list[int]] = {way: [0, 0] for way in ways}
        self.equal: dict[str, list[int]] = {way: [0, 0] for way in ways}
        self._expected: dict[str, list[list[int]]] = {}

    def add(self, name: str, which: str, way: str, took_s: float, answers: list[Answer]) -> None:
        tokens = [answer.tokens for answer in answers]
        self.speeds.setdefault((name, which, way), []).append(sum(map(len, tokens)) / took_s)
        expected = self._expected.setdefault(name, tokens)
        self.equal[way][0] += sum(pair[0] == pair[1] for pair in zip(tokens, expected, strict=True))
        self.equal[way][1] += len(tokens)
        self.drafts[way][0] += sum(answer.drafted for answer in answers)
        self.drafts[way][1] += sum(answer.right for answer in answers)

    def ratio(self, name: str, which: str, way: str, base: str = BASE) -> float:
        pairs = zip(self.speeds[name, which, way], self.speeds[name, which, base], strict=True)
        return median(own / other for own, other in pairs)

    def lines(self) -> Iterator[str]:
        """The table in Markdown, and the lines below it."""
        cells = list(dict.fromkeys((name, which) for name, which, _ in self.speeds))
        yield "| question | answer | " + " | ".join(self.ways) + " |"
        yield "| --- " * (2 + len(self.ways)) + "|"
        for name, which in cells:
            yield f"| {name} | {which} | " + " | ".join(self._cell(name, which, way) for way in self.ways) + " |"
        yield ""
        for way in self.ways:
            ratios = sorted(self.ratio(*cell, way) for cell in cells)
            drafted, right = self.drafts[way]
            proved = f", {right / drafted:.2f} of {drafted} drafts right" if drafted else ""
            same, total = self.equal[way]
            bounds = f"{ratios[0]:.2f} to {ratios[-1]:.2f} x, median {median(ratios):.2f}"
            yield f"{way}: {bounds}{proved}; {same} of {total} answers have the tokens of `{BASE}`'s first round"
        yield from self._beside_peers(cells)

    def _cell(self, name: str, which: str, way: str) -> str:
        speed = f"{median(self.speeds[name, which, way]):.0f}"
        return speed if way == BASE else f"{speed} ({self.ratio(name, which, way):.2f})"

    def _beside_peers(self, cells: list[tuple[str, str]]) -> Iterator[str]:
        """Compares our fastest way with drafts with the fastest peer, cell by cell."""
        ours = [way for way in self.ways if way in WAYS or way == "draft_model"]
        theirs = [way for way in self.ways if way not in ours]
        for name, which in cells if theirs else ():
            own, other = self._best(name, which, ours), self._best(name, which, theirs)
            ratio = self.ratio(name, which, own, other)
            yield f"{name}, {which}: {own} is {ratio:.2f} x {other}, the best of the peers"

    def _best(self, name: str, which: str, ways: list[str]) -> str:
        return max(ways, key=lambda way: median(self.speeds[name, which, way]))


# ---- the engines


def peer_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Commands of the runners, by peer and way."""
    commands: dict[str, list[str]] = {}
    for kind, venv, lookups, drafts in (
        ("llama", "llamacpp", LOOKUPS, DRAFTS),
        ("openvino", "ov", (OPENVINO_DRAFTS,), (OPENVINO_DRAFTS,)),
    ):
        files = getattr(args, kind)
        module = {"llama": "runners.llama_cpp_drafts", "openvino": "runners.openvino_drafts"}[kind]
        for most in (0, *lookups) if files else ():
            python = str(args.peers / "venvs" / venv / "bin" / "python")
            start = [python, "-m", module, f"--model={files[0]}", f"--threads={args.threads}"]
            commands[f"{kind} lookup {most}" if most else kind] = [*start, f"--most={most}"]
        for most in drafts if files[1:] else ():
            commands[f"{kind} drafts {most}"] = [*start, f"--draft-model={files[1]}", f"--most={most}"]
    return commands


def tell(odds: list[float], folder: Path) -> None:
    """Have engines start workers that know the answers (runners/told_worker.py)."""
    os.environ |= {ODDS: json.dumps(odds), TOKENS: str(folder / "told"), "PYTHONPATH": str(Path(__file__).parent)}
    launch.EngineSettings = partial(launch.EngineSettings, worker_module="runners.told_worker")  # type: ignore[attr-defined, assignment]


def write_told(args: argparse.Namespace, engine: Engine, prompts: dict[str, list[list[int]]]) -> None:
    """Write the expected answers to the file for these workers."""
    with Path(os.environ[TOKENS]).open("w") as file:
        for own in prompts.values():
            _, answers = engine.ask(own, args.tokens, "told")
            told = [prompt + answer.tokens for prompt, answer in zip(own, answers, strict=True)]
            file.writelines(json.dumps(each) + "\n" for each in told)


@contextmanager
def engines(args: argparse.Namespace) -> Iterator[dict[str, Engine]]:
    """Start all engines, by the names of their ways."""
    drafting = {"model": args.draft_model, "num_speculative_tokens": 4, "quantization": args.draft_quantization}
    by_model = {"draft_model": {name: value for name, value in drafting.items() if value is not None}}
    settings = {"max_model_len": args.max_model_len, "dtype": args.dtype, "quantization": args.quantization}
    settings |= {"disable_adaptive_drafts": args.fixed, "deterministic": args.deterministic}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        found: dict[str, Engine] = {}
        if args.odds:
            tell(args.odds, folder)
        for way in args.ways:
            config = (WAYS | by_model)[way]
            if config is not None and args.most:
                config = config | {"num_speculative_tokens": args.most}
            limits = {"cpu_threads": args.threads, "max_num_seqs": max(8, args.streams)}
            llm = LLM(args.model, speculative_config=config, **limits, **settings)
            found[way] = Ours(stack.enter_context(llm), args.streams)
        for way, command in peer_commands(args).items():
            peer = Peer(command, folder / f"{way.replace(' ', '-')}.log")
            stack.callback(peer.close)
            found[way] = Theirs(peer)
        yield found


def prompts_of(args: argparse.Namespace, llm: LLM) -> dict[str, list[list[int]]]:
    """The prompts of each cell: one, or all that several streams answer one after the other."""
    if args.random:
        draw, vocab_size = random.Random(50), args.below or llm.engine.vocab_size
        prompts = [[draw.randrange(3, vocab_size) for _ in range(RANDOM_LENGTH)] for _ in range(args.random)]
        cells = {f"random {number}": [own] for number, own in enumerate(prompts, start=1)}
    else:
        cells = {name: [encode(args, llm, QUESTIONS[name])] for name in args.questions}
    if args.streams == 1:
        return cells
    if args.random:
        return {name: [[3 + n, *own] for n in range(WAVES * args.streams)] for name, (own,) in cells.items()}
    asked = [args.questions[n % len(args.questions)] for n in range(WAVES * args.streams)]
    return {"mixed": [encode(args, llm, f"{n}. {QUESTIONS[name]}") for n, name in enumerate(asked)]}


def encode(args: argparse.Namespace, llm: LLM, text: str) -> list[int]:
    if args.plain:
        return list(llm.get_tokenizer().encode(text))
    params, chat = SamplingParams(max_tokens=1), [{"role": "user", "content": text}]
    (output,) = llm.chat(chat, params, use_tqdm=False, chat_template=args.chat_template)
    return list(output.prompt_token_ids or [])


class Question(NamedTuple):
    name: str
    which: str
    prompts: list[list[int]]


def questions(prompts: dict[str, list[list[int]]], *, again: bool) -> Iterator[Question]:
    for name, own in prompts.items():
        for which in ("first", "again") if again else ("first",):
            yield Question(name, which, own)


def measure(args: argparse.Namespace) -> Figures:
    with engines(args) as found:
        prompts = prompts_of(args, next(each.llm for each in found.values() if isinstance(each, Ours)))
        warm = [[20 + stream, *range(5, 4 + KEY_TOKENS)] for stream in range(args.streams)]
        if args.odds:
            write_told(args, found[BASE], prompts | {"warm": warm})
        figures = Figures(list(found))
        for engine in found.values():
            engine.ask(warm, WARM_TOKENS, "warm")
        for index in range(args.rounds):
            for asked in questions(prompts, again=not args.first):
                # Requests after a pause are slower, so each round begins with another engine.
                order = list(found)[index % len(found) :] + list(found)[: index % len(found)]
                for way in order:
                    took_s, answers = found[way].ask(asked.prompts, args.tokens, f"round {index}")
                    figures.add(asked.name, asked.which, way, took_s, answers)
            print(f"round {index + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    args = arguments()
    figures = measure(args)
    print("\n".join(figures.lines()))
    if args.out:
        keyed = {", ".join(key): [round(speed, 1) for speed in speeds] for key, speeds in figures.speeds.items()}
        args.out.write_text(json.dumps({"command": sys.argv[1:], "tokens_per_s": keyed}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "draft_model"], default=["none", "ngram", "suffix"])
    parser.add_argument("--draft-model", help="of the way draft_model")
    parser.add_argument("--draft-quantization", help="of the way draft_model")
    parser.add_argument("--odds", nargs="+", type=float, help="of drafts by their place, each behind right ones")
    parser.add_argument("--most", type=int, help="drafts of a step, in place of each way's own")
    parser.add_argument("--fixed", action="store_true", help="always as many drafts (--disable-adaptive-drafts)")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--questions", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--first", action="store_true", help="ask each question once a round")
    parser.add_argument("--chat-template", help="of the questions, where the checkpoint has none: Jinja, or a file")
    parser.add_argument("--plain", action="store_true", help="questions as they are, without a chat template")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N prompts of random tokens, no questions")
    parser.add_argument(
        "--below", type=int, default=0, metavar="ID", help="random tokens below ID, such as frequent ones"
    )
    parser.add_argument("--peers", type=Path, help="the folder that runners/setup.sh made")
    parser.add_argument("--llama", nargs="+", default=[], metavar="GGUF", help="the model, and one that drafts for it")
    parser.add_argument("--openvino", nargs="+", default=[], metavar="FOLDER", help="the same for OpenVINO")
    parser.add_argument("--out", type=Path, help="write the speeds as JSON, too")
    args = parser.parse_args()
    if args.ways[0] != BASE:
        parser.error(f"--ways must begin with {BASE}, got {args.ways[0]}")
    if (args.llama or args.openvino) and (args.peers is None or args.streams > 1):
        parser.error("--llama and --openvino need --peers, and one stream")
    return args


if __name__ == "__main__":
    main()
