"""Request bodies for vectors and scores, as structs, under the names that vLLM, OpenAI, Jina and Cohere use."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.client.token_classes import Aggregation
from vllm_lite.protocol.pooling import PoolingParams, PoolingTask
from vllm_lite.server.openai.bodies import Messages, Name, Part, RequestId, Variables
from vllm_lite.server.openai.errors import ApiError
from vllm_lite.server.pooling.encodings import EmbedDtype, Encoding, Endianness

MAX_TEXTS = 16_384
"""Maximum number of texts of one request."""
MAX_PARTS = 1024
"""Maximum number of parts of one of Cohere's inputs."""
MAX_LABELS = 1024
"""Maximum number of labels that a request can ignore."""
MAX_NUMBER_BYTES = 64 * 1024 * 1024
"""Maximum bytes of float32 numbers for all texts of one request, which are kept until the last text is done."""

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class PoolingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all bodies share. `normalize`, and `activation` and `softmax` of classifiers, are older names of
    `use_activation`."""

    model: str | None = None
    user: Name | None = None
    request_id: RequestId | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    deadline_ms: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None

    def params(self, **more: Any) -> PoolingParams:
        """Make the pooling params. Raises ApiError."""
        active = next(
            (each for each in (self.use_activation, self.normalize, self.activation, self.softmax) if each is not None),
            None,
        )
        fields: dict[str, Any] = {
            "use_activation": active,
            "priority": self.priority or 0,
            "user": self.user or None,
            "cache_salt": self.cache_salt,
            "deadline_ms": self.deadline_ms,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
        }
        try:
            return PoolingParams(**(fields | more))
        except ValueError as error:
            name = str(error).partition(":")[0].split(" ")[0]
            raise ApiError(400, str(error), name) from error


class InputFields(PoolingFields, frozen=True, kw_only=True):
    """Texts, token ids, or the messages of a chat."""

    input: str | list[str | int | list[int]] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None

    tools: None = None
    tool_choice: None = None


class EmbeddingBody(InputFields, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: int | None = None

    @property
    def encoding(self) -> Encoding:
        """Encoding of numbers in base64 and bytes."""
        return Encoding(self.embed_dtype or "float32", self.endianness or "native")


class PoolingBody(EmbeddingBody, frozen=True, kw_only=True):
    """POST /pooling: any task of the model; its first by default."""

    task: PoolingTask | Literal["plugin"] | None = None

    def checked_task(self, default: PoolingTask) -> PoolingTask:
        """The requested task. Raises ApiError for the task of vLLM's plugins."""
        if self.task == "plugin":
            text = "the task 'plugin' is not supported: it is done by code of vLLM's plugins, and none is loaded here"
            raise ApiError(400, text, "task")
        return self.task or default


class TokenClassifyBody(PoolingFields, frozen=True, kw_only=True):
    """POST /token_classify: entities of texts. `aggregation_strategy` and `ignore_labels` are those of transformers'
    pipeline, plus "viterbi"; windows of a long text share `stride` tokens; `redact` also returns each text with labels
    in place of its entities."""

    input: str | Texts
    aggregation_strategy: Aggregation | None = None
    ignore_labels: Annotated[list[Name], Meta(max_length=MAX_LABELS)] | None = None
    stride: Annotated[int, Meta(ge=0)] | None = None
    redact: bool = False

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class ClassifyBody(InputFields, frozen=True, kw_only=True):
    """POST /classify."""


class CohereInput(msgspec.Struct, frozen=True):
    """One of the `inputs` of Cohere's API: a user message."""

    content: Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)]


class CohereEmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v2/embed, with the fields of Cohere's API that vLLM accepts. `input_type` names one of the task prompts in
    the model's folder."""

    model: str | None = None
    input_type: str | None = None
    texts: Texts | None = None
    inputs: Annotated[list[CohereInput], Meta(min_length=1, max_length=MAX_TEXTS)] | None = None
    images: list[Any] | None = None
    output_dimension: int | None = None
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = None
    priority: int | None = None
    request_id: RequestId | None = None

    def params(self) -> PoolingParams:
        """Make the pooling params. Raises ApiError."""
        kept = None if self.truncate == "NONE" else self.max_tokens or -1
        side: Literal["left", "right"] = "left" if self.truncate == "START" else "right"
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ApiError(400, f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        fields = PoolingFields(truncate_prompt_tokens=kept, truncation_side=side, priority=self.priority)
        return fields.params(dimensions=self.output_dimension)


Side = str | Texts


class PairFields(PoolingFields, frozen=True, kw_only=True):
    """Fields that scores and rankings share: the maximum number of tokens of each side; 0 = no limit."""

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None


class ScoreBody(PairFields, frozen=True, kw_only=True):
    """POST /score: one text with each of several, or texts in pairs, under any of vLLM's names."""

    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    encoding_format: Literal["float"] | None = None

    def sides(self) -> tuple[str | list[str], str | list[str]]:
        """Both sides. Raises ApiError."""
        first = next((side for side in (self.text_1, self.data_1, self.queries) if side is not None), None)
        second = next(
            (side for side in (self.text_2, self.data_2, self.documents, self.items) if side is not None), None
        )
        if first is None or second is None:
            name = "text_1" if first is None else "text_2"
            raise ApiError(400, "give text_1 and text_2, queries and documents, or data_1 and data_2", name)
        return first, second


class Document(msgspec.Struct, frozen=True):
    """A document as an object; its other fields are ignored."""

    text: str


class RerankBody(PairFields, frozen=True, kw_only=True):
    """POST /rerank, with the fields of Jina's and of Cohere's API."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: int | None = None
    return_documents: bool | None = None
    max_chunks_per_doc: int | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]
