"""Checks of tests/acceptance/families_served.py on servers and commands.

A check is a function of a `Subject` and a `Server`. It returns a word for its cell, "ok", or "-" if it does not apply,
and raises Unexpected with a sentence about the failure. Its name is that of its column.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.deadlines import scaled
from tests.e2e.reference import Case, Reference, start
from tests.http_server import Server, children, client
from vllm_lite import SamplingParams
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.models.registry import Sizes, build

LONG = 400
"""Tokens of a stream that is long enough to be running when a process is killed."""
MAX_LOGPROB_ERROR = 2e-4
MAX_EXCESS = 1.5
"""Maximum of our distance to float32 as a multiple of the distance of transformers in bfloat16, averaged over one
prompt."""
INT8_ERROR = (1e-4, 1.0)
"""Bounds of the average change of a logprob by int8: above the rounding of float32, below the change by another
model."""
FORM = {"type": "object", "properties": {"a": {"enum": ["b", "cd"]}}, "required": ["a"], "additionalProperties": False}
REGEX = "[a-f]{3}-[0-9]{2}"


class Unexpected(Exception):
    """A check has failed."""


def must(holds: bool, says: str) -> None:
    if not holds:
        raise Unexpected(says)


@dataclass
class Subject:
    """A checkpoint, and transformers' results for it."""

    name: str
    path: Path
    case: Case
    reference: Reference
    long: list[int] = field(default_factory=list)
    """LONG tokens of the first server, without faults."""

    @cached_property
    def spec(self) -> ModelSpec:
        return load_spec(self.path)

    @property
    def native(self) -> bool:
        return self.spec.implementation == "native"

    def body(self, **others: Any) -> dict[str, Any]:
        usual = {"prompt": self.case.prompt, "max_tokens": len(self.case.tokens), "temperature": 0}
        return usual | {"ignore_eos": True, "return_token_ids": True} | others


def post(server: Server, route: str, asked: dict[str, Any]) -> Any:
    with client(server) as http:
        answer = http.post(route, json=asked)
    must(answer.status_code == 200, f"{route} answers {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def completion(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = post(server, "/v1/completions", asked)["choices"][0]
    return choice


def events(http: httpx.Client, route: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The choices of a stream's events."""
    with http.stream("POST", route, json=asked | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                must("error" not in event, f"the stream says {event.get('error')}")
                yield from event["choices"]


def streamed(http: httpx.Client, asked: dict[str, Any]) -> Iterator[list[int]]:
    """The token ids of every event of a completion."""
    return (choice.get("token_ids") or [] for choice in events(http, "/v1/completions", asked))


def metric(server: Server, name: str) -> float:
    with client(server) as http:
        found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    if found is None:
        raise Unexpected(f"there is no metric {name}")
    return float(found.group(1))


def prompt_scores(server: Server, subject: Subject) -> torch.Tensor:  # float64 [num_tokens - 1]
    """Log-probabilities of the case's tokens, prompt and continuation, except for the first one."""
    tokens = subject.case.prompt + subject.case.tokens
    asked = subject.body(prompt=tokens, echo=True, max_tokens=0, logprobs=1)
    return torch.tensor(completion(server, asked)["logprobs"]["token_logprobs"][1:], dtype=torch.float64)


def their_scores(reference: Reference, case: Case) -> torch.Tensor:  # float64 [num_tokens - 1]
    tokens = case.prompt + case.tokens
    logits = reference.logits(tokens[:1], tokens[1:]).double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "vllm_lite", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=scaled(60), check=False)


def words_of(server: Server) -> list[str]:
    """The command with which the server was started."""
    args = server.process.args
    if not isinstance(args, list):
        raise Unexpected("the server was started otherwise")
    return [str(word) for word in args]


# ---- of the first server


def models(subject: Subject, server: Server) -> str:
    with client(server) as http:
        (model,) = http.get("/v1/models").json()["data"]
    expected = subject.spec.max_position_embeddings
    must(model["max_model_len"] == expected, f"max_model_len {model['max_model_len']}, the model has {expected}")
    whose = f"({subject.spec.implementation})"
    must(whose in server.output, f"the log does not say {whose}")
    return "ok"


def tokens(subject: Subject, server: Server) -> str:
    got = completion(server, subject.body())["token_ids"]
    must(got == subject.case.tokens, f"{got} and not transformers' {subject.case.tokens}")
    return "ok"


def logprobs(subject: Subject, server: Server) -> str:
    case = subject.case
    ours = torch.tensor(completion(server, subject.body(logprobs=2))["logprobs"]["token_logprobs"])
    theirs = case.logits.log_softmax(-1).gather(1, torch.tensor(case.tokens)[:, None])[:, 0]
    error = float((ours - theirs).abs().max())
    must(error < MAX_LOGPROB_ERROR, f"a log-probability differs by {error:.1e}")
    return "ok"


def stream(subject: Subject, server: Server) -> str:
    with client(server) as http:
        got = list(chain(*streamed(http, subject.body())))
    must(got == subject.case.tokens, f"{got} and not {subject.case.tokens}")
    return "ok"


def chat(_: Subject, server: Server) -> str:
    asked = {"messages": [{"role": "user", "content": "One, two"}], "temperature": 0, "max_tokens": 20}
    whole = post(server, "/v1/chat/completions", asked | {"logprobs": True})["choices"][0]
    with client(server) as http:
        pieces = [choice["delta"].get("content") or "" for choice in events(http, "/v1/chat/completions", asked)]
    must("".join(pieces) == whole["message"]["content"], f"{pieces} is not {whole['message']['content']!r}")
    must(bool(whole["logprobs"]["content"]), "a chat has no log-probabilities")
    return "ok"


def samples(subject: Subject, server: Server) -> str:
    """Check n=2, twice: the two samples differ, and both calls give the same."""
    asked = subject.body(n=2, temperature=1, seed=4)
    one, other = ([choice["token_ids"] for choice in post(server, "/v1/completions", asked)["choices"]] for _ in "12")
    must(one == other, "a seed gives other tokens the second time")
    must(one[0] != one[1], "both samples are the same")
    return "ok"


def regex(subject: Subject, server: Server) -> str:
    asked = subject.body(structured_outputs={"regex": REGEX}, temperature=1, seed=3, ignore_eos=False)
    text = completion(server, asked)["text"]
    must(re.fullmatch(REGEX, text) is not None, f"{text!r} does not match {REGEX}")
    return "ok"


def schema(_: Subject, server: Server) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    asked = {"messages": [{"role": "user", "content": "One"}], "max_tokens": 60, "seed": 5, "response_format": form}
    text = post(server, "/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    must(re.fullmatch(r'\{\s*"a"\s*:\s*"(b|cd)"\s*\}', text) is not None, f"{text!r} is not of the form")
    return "ok"


def prefix(subject: Subject, server: Server) -> str:
    answer = post(server, "/v1/completions", subject.body())
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    must(cached > 0, "the second time no token of the prompt is cached")
    must(answer["choices"][0]["token_ids"] == subject.case.tokens, "other tokens behind a cached prefix")
    return "ok"


def fork(subject: Subject, server: Server) -> str:
    """Check that two greedy branches of a running stream equal it. Keeps its tokens for later checks."""
    with client(server) as http:
        running = streamed(http, subject.body(max_tokens=LONG, request_id="trunk"))
        begun = next(running)
        told = post(server, "/v1/requests/cmpl-trunk/fork", {"n": 2, "return_token_ids": True})
        subject.long = [*begun, *chain(*running)]
    must(len(subject.long) == LONG, f"a stream of {LONG} tokens has {len(subject.long)}")
    branches = [choice["token_ids"] for choice in told["choices"]]
    must(branches == [subject.long] * 2, f"branches go another way: {branches} and not {subject.long}")
    return "ok"


def goes_on(subject: Subject, server: Server, module: str) -> str:
    """Kill a process during a stream, and check that the stream continues with the same tokens."""
    victim = children(server.process.pid)[module]
    with client(server) as http:
        running = streamed(http, subject.body(max_tokens=LONG))
        got = next(running)
        os.kill(victim, signal.SIGKILL)
        got = [*got, *chain(*running)]
    must(got == subject.long, f"other tokens behind the death: {got} and not {subject.long}")
    server.wait_for(f"(pid {victim})")
    must(children(server.process.pid)[module] != victim, "nothing took its place")
    return "ok"


def worker(subject: Subject, server: Server) -> str:
    return goes_on(subject, server, "vllm_lite.worker.process")


def engine(subject: Subject, server: Server) -> str:
    return goes_on(subject, server, "vllm_lite.engine.process")


EAGER = ("deepseek-v32", "glm-moe-dsa")
"""Models with an operation that has no native kernel: attention to keys that an index selects."""


def recorded(subject: Subject, server: Server) -> str:
    """Check that decode steps of native models are recorded programs."""
    found = "a decode step is recorded as a program of" in server.output
    reason = re.search("decode steps are not recorded: .*|decode steps run without graphs: .*", server.output)
    if reason and subject.name in EAGER and "is an operation of torch" in reason.group():
        return "no"
    must(found is subject.native, reason.group() if reason else f"recorded: {found}")
    return "ok" if found else "-"


def replay(_: Subject, server: Server) -> str:
    """End the server, and replay its trace with all lives of its engine."""
    must(server.stop() == 0, f"the server ended with {server.process.returncode}")
    words = words_of(server)
    done = command("replay", words[words.index("--record") + 1], "--assert")
    must(done.returncode == 0, f"replay: {(done.stderr or done.stdout)[-300:]}")
    must("life 2" in done.stdout, "the trace of the second engine is missing")
    return "ok"


# ---- of the others


def same_long(subject: Subject, server: Server) -> str:
    """Check that a long answer has the same tokens as that of the first server."""
    got = completion(server, subject.body(max_tokens=LONG))["token_ids"]
    must(got[: len(subject.case.tokens)] == subject.case.tokens, f"{got} and not transformers' {subject.case.tokens}")
    must(got == subject.long or not subject.long, f"{got} and not {subject.long}, as by the first server")
    return "ok"


def ngram(subject: Subject, server: Server) -> str:
    same_long(subject, server)
    must(metric(server, "vllm:spec_decode_num_draft_tokens_total") > 0, "nothing was drafted")
    return "ok"


def other(subject: Subject, server: Server) -> str:
    """Check that transformers' code in our engine gives the native model's tokens."""
    must("(transformers)" in server.output, "it is native")
    return tokens(subject, server)


def bfloat16(subject: Subject, server: Server) -> str:
    exact = their_scores(subject.reference, subject.case)
    theirs = their_scores(Reference(subject.path, "bfloat16"), subject.case)
    error, limit = (float((scores - exact).abs().mean()) for scores in (prompt_scores(server, subject), theirs))
    must(0 < error < MAX_EXCESS * limit, f"log-probabilities are {error:.4f} from float32's, transformers' {limit:.4f}")
    must(len(completion(server, subject.body())["token_ids"]) == len(subject.case.tokens), "not all tokens came")
    return "ok"


def int8(subject: Subject, server: Server) -> str:
    """Check that int8 gives the tokens of an engine in this process, and log-probabilities near those of float32."""
    error = float((prompt_scores(server, subject) - their_scores(subject.reference, subject.case)).abs().mean())
    must(INT8_ERROR[0] < error < INT8_ERROR[1], f"log-probabilities are {error:.4f} from float32's")
    one = SamplingParams(temperature=0.0, max_tokens=len(subject.case.tokens), ignore_eos=True)
    with start(subject.path, dtype="float32", quantization="int8") as llm:
        expected = llm.generate([subject.case.prompt], one, use_tqdm=False)[0].outputs[0].token_ids
    got = completion(server, subject.body())["token_ids"]
    must(got == expected, f"{got}, and in one process {expected}")
    return "ok"


def plan(subject: Subject, server: Server) -> str:
    """Check that `plan` predicts the engine's number of blocks and the bytes of the weights."""
    words = words_of(server)
    done = command("plan", *words[words.index("serve") + 1 : words.index("--log-level")], "--json")
    must(done.returncode == 0, f"plan: {done.stderr[-300:]}")
    said = json.loads(done.stdout)
    with client(server) as http:
        found = re.search(r'num_gpu_blocks="(\d+)"', http.get("/metrics").text)
    must(
        found is not None and int(found.group(1)) == said["num_blocks"], f"{found} blocks, {said['num_blocks']} planned"
    )
    must(said["max_model_len"] == subject.spec.max_position_embeddings, f"max_model_len {said['max_model_len']}")
    if subject.native:
        groups = build(subject.spec, "float32", "cpu", Sizes(8, 8)).weight_groups()
        held = sum(4 * slot.num_elements for group in groups for slot in group.slots)
        must(said["weights_bytes"] == held, f"{held} bytes of weights, {said['weights_bytes']} planned")
    must(said["weights_bytes"] == weights_bytes(Checkpoint(subject.spec, read_headers(subject.path)), 4), "other bytes")
    return "ok"


# ---- of commands alone


def beyond(subject: Subject) -> str:
    """Check that a context beyond the model's positions is refused with one sentence."""
    most = subject.spec.max_position_embeddings
    done = command("serve", str(subject.path), "--max-model-len", str(most + 1), "--port", "0")
    lines = done.stderr.splitlines()
    expected = f"vllm-lite: max_model_len must be at most the model's {most} positions, got {most + 1}"
    must((done.returncode, lines) == (2, [expected]), f"exit status {done.returncode}: {done.stderr[-300:]}")
    return "ok"
