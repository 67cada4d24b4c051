"""Typed decisions through a whole engine: probabilities of transformers, the same bits in any schedule, and HTTP."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import scaled
from tests.decisions import QUESTIONS, STATE, Oracle, as_decider, probabilities_of, write_decider
from tests.e2e.reference import start
from tests.families.hybrid import VARIANTS
from tests.http_server import DEADLINE_S, Server, serving, until
from tests.lora_adapters import make_adapter
from vllm_lite import LLM, AsyncClient, LoRARequest, SamplingParams
from vllm_lite.client.decisions.questions import read_questions, read_state
from vllm_lite.errors import RequestError
from vllm_lite.kernels import cpu

WITHIN = 1e-5
NOUL = {"type": "noul", "instructions": "Is it?"}
needs_native = pytest.mark.skipif(not cpu.available(), reason="needs the native library")


@pytest.fixture(scope="module")
def decider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decider(tmp_path_factory.mktemp("decider") / "m", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def oracle(decider: Path) -> Oracle:
    return Oracle(decider)


def worst_difference(
    oracle: Oracle, found: Any, state: Any, questions: dict[str, Any], instructions: str = ""
) -> float:
    """The largest difference of a probability, or of a label mass, from that of transformers."""
    worst = 0.0
    for question in read_questions(questions):
        expected = oracle.ask(read_state(state), question, instructions)
        got = [*probabilities_of(found.answers[question.id]), found.diagnostics[question.id].label_mass]
        wanted = [*expected.probabilities, expected.label_mass]
        worst = max(worst, *(abs(one - other) for one, other in zip(got, wanted, strict=True)))
    return worst


def num_shared(oracle: Oracle, state: str, questions: Any) -> int:
    """Tokens of the blocks that the prompts of all questions begin with."""
    prompts = [oracle.prompt(state, each) for each in read_questions(questions)]
    by_place = enumerate(zip(*prompts, strict=False))
    return next(place for place, tokens in by_place if len(set(tokens)) > 1) // 16 * 16


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_probabilities_match_transformers(family: str, tmp_path: Path) -> None:
    model = write_decider(tmp_path / "m", family, max_position_embeddings=4096)
    oracle = Oracle(model)
    many = {f"q{number}": {"type": "noul", "instructions": f"Is it {number}?"} for number in range(20)}
    long = "The quick brown fox jumps over the lazy dog. " * 15
    with start(model, max_num_batched_tokens=64) as llm:
        found = llm.decide(STATE, QUESTIONS, instructions="Be fair.")
        assert worst_difference(oracle, found, STATE, QUESTIONS, "Be fair.") < WITHIN
        lengths = [len(oracle.prompt(read_state(STATE), each, "Be fair.")) for each in read_questions(QUESTIONS)]
        assert found.num_prompt_tokens == sum(lengths)
        found = llm.decide(long, many)
        assert worst_difference(oracle, found, long, many) < WITHIN
        shared = num_shared(oracle, long, many)
        assert found.num_cached_tokens >= 19 * shared > 0, "the state is computed once, in however many steps"
        assert set(found.answers) == set(many)


def test_a_hybrid_keeps_its_state_where_questions_part(tmp_path: Path) -> None:
    variant = next(each for each in VARIANTS if each.name.startswith("lfm2"))
    model = as_decider(variant.make(tmp_path / "m"))
    oracle, long = Oracle(model), "The quick brown fox. " * 5
    many = {f"q{number}": {**NOUL, "instructions": f"{number} is it, {'or is it not, ' * 9}?"} for number in range(6)}
    with start(model, max_num_batched_tokens=64) as llm:
        found = llm.decide(long, many)
    assert worst_difference(oracle, found, long, many) < WITHIN
    assert found.num_cached_tokens >= 5 * num_shared(oracle, long, many) > 0


def test_invalid_questions_are_refused_before_anything_is_computed(decider: Path) -> None:
    with start(decider) as llm:
        before = llm.stats().prompt_tokens
        for state, questions, options, message in (
            ("", QUESTIONS, {}, "state must be a text or JSON"),
            (STATE, {"q": {"type": "rank"}}, {}, "type must be one of choice, noul, score"),
            (STATE, QUESTIONS, {"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking must be false"),
            (STATE, QUESTIONS, {"temperature": 1.0}, "decide\\(\\) has no parameter 'temperature'"),
            (STATE, QUESTIONS, {"priority": "high"}, "priority must be an integer"),
            ("the fox " * 5000, QUESTIONS, {}, "question 'team': .*maximum context length is 4096 tokens"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.decide(state, questions, **options)
        assert llm.stats().prompt_tokens == before
        with pytest.raises(RequestError, match="question 'team': the deadline of 1 ms passed"):
            llm.decide("the fox " * 400, QUESTIONS, deadline_ms=1)
        assert set(llm.decide(STATE, QUESTIONS).answers) == set(QUESTIONS)


def test_a_model_without_a_template_is_asked_in_plain_text(tmp_path: Path) -> None:
    with start(write_decider(tmp_path / "m", template=None)) as llm:
        found = llm.decide("state", QUESTIONS)
        assert sum(probabilities_of(found.answers["team"])) == pytest.approx(1.0)


@needs_native
def test_probabilities_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Alone, beside others, after hits, in chunks and when blocks are lost: in bfloat16."""
    model = write_decider(tmp_path / "m", dtype="bfloat16", max_position_embeddings=4096)
    source = random.Random(7)
    states = [" ".join(source.choices(["the", "fox", "page", "engine", "dog"], k=length)) for length in (5, 60, 200)]
    settings: dict[str, Any] = {"deterministic": True, "dtype": "bfloat16"}
    with start(model, max_num_seqs=1, enable_prefix_caching=False, **settings) as llm:
        alone = {
            (state, name): llm.decide(state, {name: question})
            for state in states
            for name, question in QUESTIONS.items()
        }
    for more in ({}, {"max_num_batched_tokens": 48, "max_num_seqs": 3, "num_gpu_blocks_override": 120}):
        with start(model, **settings, **more) as llm:
            names = list(QUESTIONS)
            for _ in range(8):
                state = source.choice(states)
                asked = source.sample(names, source.randint(1, len(names)))
                found = llm.decide(state, {name: QUESTIONS[name] for name in asked})
                for name in asked:
                    assert found.answers[name] == alone[state, name].answers[name]
                    assert found.diagnostics[name] == alone[state, name].diagnostics[name]
            assert llm.stats().cached_tokens > 0


async def test_clients_of_one_engine_decide_and_generate_at_once(decider: Path, tmp_path: Path, oracle: Oracle) -> None:
    adapter = make_adapter(decider, tmp_path / "adapter")
    with LLM(str(decider), dtype="float32", enable_lora=True, max_loras=1, cpu_threads=1, single_process=True) as llm:
        async with AsyncClient(llm.address) as one, asyncio.timeout(scaled(60.0)):

            async def generate() -> None:
                async for _ in one.generate("the fox", SamplingParams(max_tokens=30, ignore_eos=True)):
                    pass

            answers = await asyncio.gather(*(one.decide(STATE, QUESTIONS) for _ in range(3)), generate())
            for found in answers[:3]:
                assert worst_difference(oracle, found, STATE, QUESTIONS) < WITHIN
            adapted = await one.decide(STATE, QUESTIONS, lora_request=LoRARequest("a", 1, str(adapter)))
            assert worst_difference(oracle, adapted, STATE, QUESTIONS) > 0.01
            with pytest.raises(RequestError, match="questions takes at most 64"):
                await one.decide(STATE, {str(number): NOUL for number in range(65)})
            await one.pause_generation("keep")
            task = asyncio.ensure_future(one.decide("the fox", QUESTIONS))
            while not (await one.stats()).num_waiting:
                assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await one.stats()).num_waiting:  # the engine answers between its steps
                pass
            await one.resume_generation()
            assert set((await one.decide("the fox", QUESTIONS)).answers) == set(QUESTIONS)


# ---- HTTP


@pytest.fixture(scope="module")
def server(decider: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapter = make_adapter(decider, tmp_path_factory.mktemp("adapter") / "a")
    flags = ["--dtype", "float32", "--cpu-threads", "1", "--served-model-name", "decider"]
    flags += ["--deterministic"] if cpu.available() else []
    flags += ["--enable-lora", "--lora-modules", f"adapted={adapter}"]
    with serving("--model", str(decider), *flags, "--max-num-seqs", "4", "--max-num-batched-tokens", "64") as server:
        yield server


def test_the_route_answers_with_the_fields_of_vllm(http: httpx.Client, oracle: Oracle) -> None:
    body = {"model": "decider", "state": STATE, "questions": QUESTIONS, "instructions": "Be fair.", "request_id": "x"}
    answer = http.post("/v1/systemone", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["id"], found["object"], found["model"]) == ("decision-x", "structured_decision", "decider")
    assert found["deterministic"] is cpu.available()
    assert set(found) == {"id", "object", "created", "model", "answers", "usage", "diagnostics", "deterministic"}
    for question in read_questions(QUESTIONS):
        got, expected = found["answers"][question.id], oracle.ask(read_state(STATE), question, "Be fair.")
        assert got["type"] == question.kind
        assert list(got["probabilities"].values()) == pytest.approx(expected.probabilities, abs=WITHIN)
        assert got["confidence"] == pytest.approx(max(expected.probabilities) * expected.label_mass, abs=WITHIN)
        diagnostics = found["diagnostics"][question.id]
        assert diagnostics["label_mass"] == pytest.approx(expected.label_mass, abs=WITHIN)
        assert type(diagnostics["argmax_is_label"]) is bool
    assert set(found["answers"]["team"]) == {"type", "choice", "probabilities", "confidence"}
    assert list(found["answers"]["team"]["probabilities"]) == list(QUESTIONS["team"]["criteria"])
    assert set(found["answers"]["urgent"]) == {"type", "noul", "probabilities", "confidence"}
    assert found["answers"]["tone"]["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    usage = found["usage"]
    assert (usage["output_tokens"], usage["input_tokens"] > 0) == (3, True)
    again = http.post("/v1/systemone", json={**body, "questions": dict(reversed(QUESTIONS.items()))}).json()
    if cpu.available():
        assert {name: again["answers"][name] for name in QUESTIONS} == found["answers"], "the same bits after hits"
    assert again["usage"]["input_tokens"] == usage["input_tokens"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > usage["input_tokens_details"]["cached_tokens"]


def test_an_adapter_decides_by_its_name(http: httpx.Client) -> None:
    body = {"state": STATE, "questions": QUESTIONS}
    plain, adapted = (http.post("/v1/systemone", json={**body, **more}).json() for more in ({}, {"model": "adapted"}))
    assert (plain["model"], adapted["model"]) == ("decider", "adapted")
    assert abs(plain["answers"]["urgent"]["noul"] - adapted["answers"]["urgent"]["noul"]) > 1e-3


def test_64_questions_wait_for_their_rows(http: httpx.Client) -> None:
    many = {f"q{number}": {"type": "noul", "instructions": f"Is it {number}?"} for number in range(64)}
    found = http.post("/systemone", json={"state": "the fox", "questions": many}).json()
    assert list(found["answers"]) == list(many)
    assert found["usage"]["output_tokens"] == 64


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"state": ""}, "state", "state must be a text or JSON"),
        ({"state": None}, "state", "state must be a text or JSON"),
        ({"questions": {}}, "questions", "questions"),
        ({"questions": dict.fromkeys(map(str, range(65)), NOUL)}, "questions", "64"),
        ({"questions": {"q": {**NOUL, "weight": 1}}}, "questions", "weight"),
        ({"questions": {"q": {"type": "rank"}}}, "questions", "question 'q': type must be one of choice, noul, score"),
        ({"questions": {"q": {"type": "choice"}}}, "questions", "criteria of a choice"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "enable_thinking must be false"),
        ({"priority": 2**40}, "priority", "priority must be between"),
        ({"state": "fox " * 6000}, "questions", "maximum context length"),
    ],
)
def test_a_body_that_is_wrong_is_refused_in_a_sentence(
    http: httpx.Client, changes: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post("/v1/systemone", json={"state": STATE, "questions": QUESTIONS, **changes})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert len(error["message"]) < 400


def test_other_refusals(http: httpx.Client) -> None:
    body = {"state": STATE, "questions": QUESTIONS}
    assert http.post("/v1/systemone", json={**body, "model": "another"}).status_code == 404
    assert http.post("/v1/systemone", json={**body, "deadline_ms": 1, "state": "fox " * 700}).status_code == 408
    named = http.post("/v1/systemone", json={**body, "temperature": 1})
    assert "temperature" in named.headers["warning"]
    document = http.get("/openapi.json").json()
    assert set(document["components"]["schemas"]["DecisionBody"]["required"]) == {"state", "questions"}


def test_a_client_that_leaves_is_not_computed_for(http: httpx.Client) -> None:
    many = {f"q{number}": {**NOUL, "instructions": f"Is it {number}?"} for number in range(64)}
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    try:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/systemone", json={"state": "fox", "questions": many, "request_id": "gone"}, timeout=0.5)
        until(lambda: not http.get("/load").json()["server_load"], "the end of the call")
        assert http.get("/v1/requests/decision-gone").status_code == 404
        assert "vllm:num_requests_waiting{" in http.get("/metrics").text
    finally:
        http.post("/resume")
    assert http.post("/v1/systemone", json={"state": "fox", "questions": {"q": NOUL}}).status_code == 200


@contextmanager
def waiting_decision(http: httpx.Client, name: str) -> Iterator[tuple[dict[str, Any], list[httpx.Response]]]:
    """Body and answer, once there is one, of a decision that waits until the block ends."""
    found: list[httpx.Response] = []
    body = {"state": "fox", "questions": {"q": NOUL, "p": NOUL}, "request_id": name}
    thread = threading.Thread(target=lambda: found.append(http.post("/v1/systemone", json=body)))
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    try:
        thread.start()
        until(lambda: http.get(f"/v1/requests/decision-{name}").status_code == 200, "the request")
        yield body, found
    finally:
        http.post("/resume")
        thread.join(DEADLINE_S)


def test_a_decision_that_runs_is_described_and_not_forked(http: httpx.Client) -> None:
    with waiting_decision(http, "y") as (body, found):
        answer = http.post("/v1/requests/decision-y/fork", json={"n": 2})
        assert http.post("/v1/systemone", json=body).status_code == 409
    assert answer.status_code == 400
    assert "generates no text; only one that does can be forked" in answer.json()["error"]["message"]
    assert found[0].status_code == 200


def test_a_decision_that_is_aborted_is_refused(http: httpx.Client) -> None:
    with waiting_decision(http, "z") as (_, found):
        assert http.delete("/v1/requests/decision-z").status_code == 200
    error = found[0].json()["error"]
    assert (found[0].status_code, error["param"], error["message"]) == (400, "questions", "the request was aborted")
