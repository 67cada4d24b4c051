"""LLM.generate with a fake engine: order, errors, interruption. The real thing is in tests/e2e."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tokenizers_for_tests as made
from tests.fakes import DEADLINE_S, FakeEngine, welcome
from vllm_lite.client.beam import BeamSearchParams
from vllm_lite.client.engines.session import Session
from vllm_lite.client.llm import LLM
from vllm_lite.client.lora import LoRARequest, begin_load
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import ConfigError, EngineDeadError, ModelError, RequestError
from vllm_lite.protocol.api import Abort, Dying, Generate, PrefixCacheReset, ResetPrefixCache, Tokens, Welcome
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import Stats

TOKENIZER = Tokenizer(made.byte_level())
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
)


@dataclass
class FakeLaunched:
    """Stands for a started engine."""

    session: Session
    config: EngineConfig
    closed: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.session.address

    @property
    def engine(self) -> Welcome:
        return self.session.welcome

    def close(self) -> None:
        self.closed.append("closed")
        self.session.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    (tmp_path / "tokenizer.json").write_bytes(made.byte_level())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "max_new_tokens": 7, "do_sample": true}')
    with FakeEngine(answer=welcome(vocab_size=TOKENIZER.vocab_size, tokenizer=str(tmp_path))) as engine:
        yield engine


@pytest.fixture
def llm(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    fake_launch(engine, monkeypatch)
    with LLM(tmp_path, tokenizer=tmp_path, generation_config="vllm") as llm:
        yield llm


def fake_launch(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: EngineConfig, meanwhile: Callable[[ResolvedConfig], None], *, streams: bool) -> FakeLaunched:
        assert not streams
        resolved = config.resolve(max_position_embeddings=1000, dtype="float32", model_path=config.model)
        meanwhile(resolved)
        return FakeLaunched(Session.connect(engine.address, timeout_s=DEADLINE_S), resolved)

    monkeypatch.setattr("vllm_lite.client.llm.launch_engines", launch)


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    """Let the engine's side of a conversation run while the test waits in generate()."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def echo(engine: FakeEngine, count: int) -> Callable[[], None]:
    """Answer `count` requests, the last first, each with its own prompt."""

    def act() -> None:
        for asked in reversed([engine.expect(Generate) for _ in range(count)]):
            engine.finish(asked.request_id, 0, *unpack_tokens(asked.prompt))

    return act


def test_results_are_in_the_order_of_the_prompts(llm: LLM, engine: FakeEngine) -> None:
    meanwhile(echo(engine, 4))
    prompts: list[Any] = ["one", ids("two"), {"prompt": "three"}, {"prompt_token_ids": ids("four")}]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["one", "two", "three", "four"]
    assert [output.prompt for output in outputs] == ["one", None, "three", None]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["one", ids("one"), {"prompt": "one"}, {"prompt_token_ids": ids("one")}])
def test_one_prompt_needs_no_list(llm: LLM, engine: FakeEngine, prompt: Any) -> None:
    meanwhile(echo(engine, 1))
    assert [output.outputs[0].text for output in llm.generate(prompt, use_tqdm=False)] == ["one"]


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_parameters_for_each_prompt(llm: LLM, engine: FakeEngine) -> None:
    seen: list[int | None] = []

    def act() -> None:
        for _ in range(2):
            asked = engine.expect(Generate)
            seen.append(asked.params.max_tokens)
            engine.finish(asked.request_id, 0, 1)

    meanwhile(act)
    llm.generate(["a", "b"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)], use_tqdm=False)
    assert seen == [3, 4]
    with pytest.raises(RequestError, match="one for each of 3 prompts, got 2"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2, use_tqdm=False)


def test_a_bad_prompt_is_named_before_anything_is_sent(llm: LLM, engine: FakeEngine) -> None:
    with pytest.raises(RequestError, match=r"^prompt 2: the prompt is empty"):
        llm.generate(["a", "b", ""], use_tqdm=False)
    with pytest.raises(RequestError, match=r"^prompt 1: token ids must be between"):
        llm.generate([[1], [10**9]], use_tqdm=False)
    with pytest.raises(RequestError, match=r"^the prompt is empty"):
        llm.generate("", use_tqdm=False)
    with pytest.raises(RequestError, match=r"^a prompt must be a text, .* got bytes$"):
        llm.generate(b"Once", use_tqdm=False)
    engine.expect_nothing_more()


def test_a_failed_request_is_raised_after_the_others_ended(llm: LLM, engine: FakeEngine) -> None:
    ended: list[str] = []

    def act() -> None:
        first, second, third = (engine.expect(Generate).request_id for _ in range(3))
        engine.finish(second, 0, reason="error", error="the logits are not finite")
        engine.finish(first, 0, 1)
        engine.finish(third, 0, 1)
        ended.append(third)

    thread = meanwhile(act)
    with pytest.raises(RequestError, match=r"^prompt 1: the logits are not finite$"):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    thread.join(DEADLINE_S)
    assert ended
    engine.expect_nothing_more()


def test_the_engines_death_is_raised_as_such(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        first = engine.expect(Generate)
        engine.expect(Generate)
        engine.finish(first.request_id, 0, 1)
        engine.send(Dying("worker 0 died: killed by SIGKILL"))

    meanwhile(act)
    with pytest.raises(EngineDeadError, match=r"^worker 0 died: killed by SIGKILL$"):
        llm.generate(["a", "b"], use_tqdm=False)
    with pytest.raises(EngineDeadError, match="worker 0"):
        llm.generate("a", use_tqdm=False)


def test_ctrl_c_aborts_everything_in_flight(llm: LLM, engine: FakeEngine) -> None:
    started: list[str] = []

    def act() -> None:
        started.extend(engine.expect(Generate).request_id for _ in range(3))
        os.kill(os.getpid(), signal.SIGINT)

    meanwhile(act)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], use_tqdm=False)
    aborted = {engine.expect(Abort).request_id for _ in range(3)}
    assert set(started) == aborted
    for request_id in aborted:
        engine.finish(request_id, 0, reason="abort")
    meanwhile(echo(engine, 1))
    assert llm.generate("again", use_tqdm=False)[0].outputs[0].text == "again"


def test_stop_strings(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        engine.tokens(engine.expect(Generate).request_id, 0, *ids("one END two"))

    meanwhile(act)
    (output,) = llm.generate("a", SamplingParams(stop=("END",)), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one ", "END")
    engine.expect(Abort)


def test_a_stop_string_ends_its_sample_in_the_engine(llm: LLM, engine: FakeEngine) -> None:
    said: list[Abort] = []

    def act() -> None:
        request_id = engine.expect(Generate).request_id
        engine.send_outputs(Tokens(request_id, 0, ids("one END")), Tokens(request_id, 0, ids("uno"), index=1))
        said.append(engine.expect(Abort))
        engine.finish(request_id, len(ids("one END")), reason="abort")
        engine.finish(request_id, 3, *ids("s"), index=1)

    acting = meanwhile(act)
    (output,) = llm.generate("a", SamplingParams(n=2, stop=("END",)), use_tqdm=False)
    acting.join(DEADLINE_S)
    assert [(one.text, one.finish_reason) for one in output.outputs] == [("one ", "stop"), ("unos", "length")]
    assert said == [Abort(output.request_id, stopped=True, samples=(0,))]
    engine.expect_nothing_more()


def test_stats(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        engine.expect(object)
        engine.send(Stats(*range(11)))

    meanwhile(act)
    assert llm.stats() == Stats(*range(11))


def test_reset_prefix_cache(llm: LLM, engine: FakeEngine) -> None:
    def act() -> None:
        engine.expect(ResetPrefixCache)
        engine.send(PrefixCacheReset(5, 6, 7))

    meanwhile(act)
    assert llm.reset_prefix_cache() == PrefixCacheReset(5, 6, 7)


@pytest.mark.parametrize("shown", [True, False])
def test_progress(llm: LLM, engine: FakeEngine, capsys: pytest.CaptureFixture[str], shown: bool) -> None:
    meanwhile(echo(engine, 2))
    llm.generate(["one", "two"], use_tqdm=shown)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert ("2/2" in seen.err and "tokens/s" in seen.err) is shown
    assert shown or not seen.err


def test_close_ends_the_engine_once(llm: LLM) -> None:
    launched: Any = llm.launched
    llm.close()
    llm.close()
    assert launched.closed == ["closed"]


def test_the_engine_ends_with_the_last_reference(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[FakeLaunched] = []

    def launch(config: EngineConfig, meanwhile: Callable[[ResolvedConfig], None], *, streams: bool) -> FakeLaunched:
        assert not streams
        launched.append(FakeLaunched(Session.connect(engine.address, timeout_s=DEADLINE_S), config))
        return launched[0]

    monkeypatch.setattr("vllm_lite.client.llm.launch_engines", launch)
    llm = LLM("some/model", block_size=8, max_model_len="1k")
    assert (llm.config.model, llm.config.block_size, llm.config.max_model_len) == ("some/model", 8, 1000)
    del llm
    assert launched[0].closed == ["closed"]


@pytest.mark.parametrize("name", ["", "x" * 257, 5])
def test_a_bad_name_of_an_adapter_is_refused_before_it_is_sent(name: Any) -> None:
    """The engine drops a message with such a name, and the answer would be waited for in vain."""
    session: Any = SimpleNamespace(welcome=SimpleNamespace(max_loras=1), adapters={})
    with pytest.raises(RequestError, match="lora_name must be a text of 1 to 256 characters, got "):
        begin_load(session, LoRARequest(name, 1, "/adapter"))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="'block_sise'; did you mean 'block_size'"):
        LLM("some/model", block_sise=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode can only be auto or hf .*; got 'mistral'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size can only be 1 here: layers are not shared out"),
        ({"hf_token": "secret"}, "hf_token of vLLM is not supported: set HF_TOKEN"),
        ({"generation_config": "mine"}, "generation_config must be one of auto, vllm, or a folder .* got 'mine'"),
    ],
)
def test_settings_of_other_engines_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("some/model", **settings)


def test_settings_of_other_engines_that_change_nothing(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same settings as on the command line."""
    fake_launch(engine, monkeypatch)
    of_vllm: dict[str, Any] = {
        "trust_remote_code": True,
        "tokenizer_mode": "auto",
        "max_logprobs": 20,
        "limit_mm_per_prompt": {},
    }
    LLM(tmp_path, **of_vllm, skip_tokenizer_init=False, tensor_parallel_size=1, swap_space=4).shutdown()


def test_statistics_are_logged_only_on_request(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_launch(engine, monkeypatch)
    given: list[tuple[dict[str, Any], bool]] = [({}, True), ({"disable_log_stats": False}, False)]
    for settings, is_quiet in given:
        with LLM(tmp_path, **settings) as llm:
            assert llm.config.disable_log_stats is is_quiet


# ---- prompts and parameters


def test_token_ids_have_a_name_of_their_own(llm: LLM, engine: FakeEngine) -> None:
    for given, count in ((ids("one"), 1), ([ids("one"), ids("two")], 2)):
        meanwhile(echo(engine, count))
        outputs = llm.generate(prompt_token_ids=given, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == ["one", "two"][:count]
    for both in ({"prompts": "one", "prompt_token_ids": [1]}, {}):
        with pytest.raises(RequestError, match="takes prompts, or else prompt_token_ids"):
            llm.generate(**both)  # type: ignore[arg-type]


def test_the_text_of_token_ids_is_shown_as_it_is_given(llm: LLM, engine: FakeEngine) -> None:
    meanwhile(echo(engine, 1))
    (output,) = llm.generate({"prompt_token_ids": ids("one"), "prompt": "something"}, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("something", ids("one"))
    with pytest.raises(RequestError, match="got a int under 'prompt'"):
        llm.generate({"prompt_token_ids": ids("one"), "prompt": 5}, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [5, [5.0], [None]])
def test_invalid_prompts_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="a prompt must be a text, a list of token ids"):
        llm.generate(prompts, use_tqdm=False)
    with pytest.raises(RequestError, match="sampling_params must be one for all or one for each of 1 prompts, got int"):
        llm.generate("one", 5, use_tqdm=False)  # type: ignore[arg-type]


def test_the_models_own_defaults(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_launch(engine, monkeypatch)
    asked: list[SamplingParams] = []

    def act() -> None:
        for _ in range(2):
            request = engine.expect(Generate)
            asked.append(request.params)
            engine.finish(request.request_id, 0, 1)

    with LLM(tmp_path) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=7)
        meanwhile(act)
        llm.generate("one", use_tqdm=False)
        llm.generate("one", SamplingParams(max_tokens=3), use_tqdm=False)
    assert [(one.temperature, one.max_tokens) for one in asked] == [(0.5, 7), (1.0, 3)]
    with LLM(tmp_path, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with LLM(tmp_path, override_generation_config={"max_new_tokens": 3, "top_k": 4}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=4, max_tokens=3)
    with pytest.raises(ConfigError, match="override_generation_config: top_p must be"):
        LLM(tmp_path, override_generation_config={"top_p": 2})
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ModelError, match=r"generation_config.json: temperature must be .* got -1; correct it, or"):
        LLM(tmp_path)


# ---- chats

CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "x"}]
RENDERED = "[user]one;[assistant]two;[user]x;"


def chat(llm: LLM, engine: FakeEngine, messages: Any, **options: Any) -> list[str | None]:
    """The prompts that the engine was sent."""
    meanwhile(echo(engine, 1 if isinstance(messages[0], dict) else len(messages)))
    outputs = llm.chat(messages, SamplingParams(), use_tqdm=False, **options)
    assert [output.prompt_token_ids for output in outputs] == [ids(output.prompt or "") for output in outputs]
    assert [output.outputs[0].text for output in outputs] == [output.prompt for output in outputs]
    return [output.prompt for output in outputs]


def test_a_chat_goes_through_the_template(llm: LLM, engine: FakeEngine) -> None:
    assert chat(llm, engine, CHAT) == [RENDERED + "[assistant]"]
    assert chat(llm, engine, [CHAT, CHAT[:1]]) == [RENDERED + "[assistant]", "[user]one;[assistant]"]
    assert chat(llm, engine, CHAT, add_generation_prompt=False) == [RENDERED]
    assert chat(llm, engine, CHAT[:2], add_generation_prompt=False, continue_final_message=True) == [RENDERED[:24]]
    assert chat(llm, engine, CHAT, chat_template_kwargs={"mood": "happy"}) == [RENDERED + "[assistant]happy"]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(llm, engine, [{"role": "user", "content": parts}]) == ["[user]one\ntwo;[assistant]"]


def test_a_template_may_be_given(llm: LLM, engine: FakeEngine, tmp_path: Path) -> None:
    source = "{{ messages[0].content }}!"
    (tmp_path / "mine.jinja").write_text(source)
    for template in (source, tmp_path / "mine.jinja", str(tmp_path / "mine.jinja")):
        assert chat(llm, engine, CHAT, chat_template=template) == ["one!"]
    assert chat(llm, engine, CHAT) == [RENDERED + "[assistant]"]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hello", "messages must be a list of messages or of such lists, got str"),
        ([CHAT, []], "conversation 1: a conversation must be a list of at least one message"),
        ([CHAT, [{"role": "user"}]], r"conversation 1: messages\[0\].content must be a text or a list of parts"),
        ([{"content": "one"}], r"^messages\[0\] must be a dict with a role and a content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"content\[0\] is 'image_url'; no images are supported",
        ),
    ],
)
def test_bad_messages_are_named(llm: LLM, engine: FakeEngine, messages: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        llm.chat(messages, use_tqdm=False)
    engine.expect_nothing_more()


def test_chat_without_a_template_raises(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template; give one as chat_template, or use generate"):
        llm.chat(CHAT, use_tqdm=False)


def test_the_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert llm.get_tokenizer() is tokenizer
    assert tokenizer.encode("one two") == ids("one two")
    assert (tokenizer.decode(ids("one")), tokenizer.decode(ids("one")[0])) == ("one", "o")
    assert (len(tokenizer), tokenizer.eos_token_id) == (TOKENIZER.vocab_size, 2)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == RENDERED
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, mood="x") == ids(RENDERED + "[assistant]x")
    shown = tokenizer.apply_chat_template(CHAT, tools=[{"a": 1}], chat_template="{{ tools[0].a }}", tokenize=False)
    assert shown == "1"
    with pytest.raises(RequestError, match="tools must be a list of dicts"):
        llm.chat(CHAT, tools=["f"], use_tqdm=False)  # type: ignore[list-item]


# ---- beams


def test_beam_search_asks_for_beams_and_shows_whole_sequences(llm: LLM, engine: FakeEngine) -> None:
    asked: list[SamplingParams] = []

    def act() -> None:
        request = engine.expect(Generate)
        asked.append(request.params)
        engine.finish(request.request_id, 0, *ids("x"), end, reason="stop", index=0, cumulative_logprob=-1.0)
        engine.finish(request.request_id, 0, *ids("y"), index=1, cumulative_logprob=-2.0)

    end = TOKENIZER.token_id("<|end|>") or 0
    meanwhile(act)
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True, length_penalty=0.5)
    (output,) = llm.beam_search("one", params)
    expected = SamplingParams(use_beam_search=True, n=2, max_tokens=5, ignore_eos=True, length_penalty=0.5)
    assert [(one.clone(seed=None)) for one in asked] == [expected]
    shown = [(beam.text, beam.tokens, beam.cum_logprob, beam.finish_reason) for beam in output.sequences]
    assert shown == [("onex<|end|>", [*ids("onex"), end], -1.0, "stop"), ("oney", ids("oney"), -2.0, "length")]
    assert output.prompt_token_ids == ids("one")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "^beam_width must be between 1 and 64, got 0"),
        ({"max_tokens": 0}, "^max_tokens must be between"),
        ({"temperature": 0.5}, "temperature must be 0, got 0.5"),
        ({"length_penalty": "much"}, "length_penalty must be a number"),
    ],
)
def test_bad_beam_parameters_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | fields))


def test_missing_methods_are_no_attributes(llm: LLM) -> None:
    assert not hasattr(llm, "reward")
    with pytest.raises(AttributeError, match=r"LLM has no reward\(\) yet: there are embed\(\)"):
        llm.reward("text")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat("text")  # type: ignore[attr-defined]
