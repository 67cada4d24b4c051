"""decide(), the method of LLM, and the parts shared with AsyncClient."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vllm_lite.client.decisions import shared
from vllm_lite.client.decisions.answers import DecisionOutput
from vllm_lite.client.decisions.questions import read_instructions, read_questions, read_state
from vllm_lite.client.decisions.reads import ReadParams, Reads, make_reads
from vllm_lite.client.lora import LoRARequest
from vllm_lite.client.streams.stream import StreamFactory
from vllm_lite.errors import RequestError

if TYPE_CHECKING:  # Jinja is imported when it is needed
    from vllm_lite.client.chat import ChatTokenizer
    from vllm_lite.client.llm import LLM

THINKING = "enable_thinking"


class DecideOptions(ReadParams, total=False):
    """Optional parameters of decide(). `instructions` are a system message before the state."""

    instructions: Any
    chat_template: str | Path | None
    chat_template_kwargs: Mapping[str, Any] | None


def decide(
    self: "LLM",
    state: Any,
    questions: Mapping[str, Any],
    use_tqdm: bool = False,
    *,
    lora_request: LoRARequest | None = None,
    **options: Unpack[DecideOptions],
) -> DecisionOutput:
    """Answer questions about `state`, a text or JSON, by the probabilities of one token each. No text is generated.

    A question is {"type": "choice", "noul" or "score", "instructions": ..., "criteria": ...}: see docs/decisions.md.
    The state is computed once for all questions. Raises as chat() does.
    """
    self._check_awake()
    reads = prepare(self._streams, self.get_tokenizer(), state, questions, options, self._request_ids)
    self._set_adapters(reads.streams, lora_request)
    for streams in (reads.streams[:1], reads.streams[1:]):
        if streams and reads.streams[0].error is None:
            self._follow(streams, use_tqdm)
    return reads.output()


def variables_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of the chat template, which disable thinking. Raises RequestError if a request enables it."""
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"chat_template_kwargs must be a dict, got {type(given).__name__}")
    if given is not None and given.get(THINKING):
        raise RequestError(f"{THINKING} must be false: a decision is read from the first token of the reply")
    return {THINKING: False, **(given or {})}


def messages_of(said: str, instructions: str) -> list[dict[str, str]]:
    """Make a chat with this message of a user."""
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, {"role": "user", "content": said}]


def prepare(
    factory: StreamFactory,
    tokenizer: "ChatTokenizer",
    state: Any,
    questions: Any,
    options: DecideOptions,
    ids: Iterator[str],
) -> Reads:
    """Make the requests of a decision, with the next ids of `ids`. Raises RequestError, ModelError."""
    asked, said = read_questions(questions), read_state(state)
    instructions = read_instructions(options.get("instructions"))
    variables = variables_of(options.get("chat_template_kwargs"))
    template = tokenizer.find_template(options.get("chat_template"))
    if template is None:
        text = shared.plain(said, asked, instructions)
    else:
        steps = shared.rendering(said, asked)
        render = template.render
        text = shared.rendered(steps, lambda said: render(messages_of(said, instructions), variables=variables))
    names = [next(ids) for _ in asked]
    return make_reads(factory, asked, text, read_params(options), names, has_template=template is not None)


def read_params(options: DecideOptions) -> ReadParams:
    """Options that are fields of SamplingParams. Raises RequestError for one that is not known."""
    if unknown := sorted(options.keys() - DecideOptions.__annotations__.keys()):
        raise RequestError(f"decide() has no parameter {unknown[0]!r}")
    params = ReadParams()
    for name in ReadParams.__annotations__:
        if name in options:
            params[name] = options[name]  # type: ignore[literal-required]
    return params
