"""Request bodies of /derender: an answer of /inference/v1/generate, and the request that was rendered for it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.protocol.params import MAX_LOGPROBS
from vllm_lite.server.openai.bodies import MAX_CHOICES, ChatBody, CompletionBody
from vllm_lite.server.openai.errors import ApiError

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
TokenIds = list[TokenId]
Count = Annotated[int, Meta(ge=0, lt=2**53)]


class Scored(msgspec.Struct, frozen=True):
    """One candidate. The likeliest has `rank` 1."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class ScoredToken(Scored, frozen=True):
    """A token, and its candidates: the token first, the others by rank."""

    top_logprobs: Annotated[list[Scored], Meta(max_length=MAX_LOGPROBS + 1)] = []


class Scores(msgspec.Struct, frozen=True):
    content: list[ScoredToken] | None = None


class GeneratedChoice(msgspec.Struct, frozen=True):
    """The tokens of one choice, or of a chunk of one, whose `finish_reason` is None until its end."""

    index: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)] = 0
    token_ids: TokenIds | None = None
    logprobs: Scores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generated(msgspec.Struct, frozen=True):
    """An answer of /inference/v1/generate, or a chunk of one. Texts are made of the token ids alone."""

    request_id: Annotated[str, Meta(max_length=256)] = ""
    output_mode: Literal["tokens"] = "tokens"
    choices: Annotated[list[GeneratedChoice], Meta(max_length=MAX_CHOICES)] = []
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: Any = None


class StreamState(msgspec.Struct, frozen=True):
    """State that a client carries unchanged from one chunk of a stream to the next."""

    output_token_ids: TokenIds = []
    role_sent: bool = False
    created: Annotated[int, Meta(ge=0, lt=2**40)] = 0


class DerenderFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both bodies; without `stream` the request has a whole answer, with it one chunk."""

    model: str | None = None
    stream: bool = False
    generate_chunk: Generated | None = None
    stream_state: StreamState | None = None

    @property
    def chunk(self) -> Generated:
        """The chunk of a stream, with at most one choice. Raises ApiError."""
        if self.generate_chunk is None:
            raise ApiError(
                400, "with stream give generate_chunk, one chunk of /inference/v1/generate", "generate_chunk"
            )
        if len(self.generate_chunk.choices) > 1:
            text = f"a chunk has one choice, and generate_chunk has {len(self.generate_chunk.choices)}"
            raise ApiError(400, text, "generate_chunk")
        return self.generate_chunk


class DerenderChatBody(DerenderFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions/derender."""

    generate_response: Generated | None = None
    prompt_tokens: Count | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatBody | None = None


class DerenderCompletionBody(DerenderFields, frozen=True, kw_only=True):
    """POST /v1/completions/derender. With `stream`, `prompt_tokens` and `prompt_token_ids` are those of the single
    prompt."""

    generate_responses: Annotated[list[Generated], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    prompt_tokens: Count | list[Count] | None = None
    prompt_token_ids: list[TokenId | TokenIds | None] | None = None
    completion_request: CompletionBody | None = None
