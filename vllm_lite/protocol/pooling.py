"""PoolingParams: a user's parameters for embeddings, classes and scores. Pooling: their form on the wire.

A pooled request generates nothing: it ends when all tokens of its prompt are computed, with the result that the model's
pooler computes from their hidden states.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.choices import not_chosen
from vllm_lite.protocol import Message

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]
"""embed: one vector; token_embed: one vector per token; classify: one number per label; token_classify: one number per
label and token; score: a single number."""
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "token_embed", "classify", "token_classify", "score")
TOKEN_TASKS: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify"})
"""Tasks with a result for each token of a prompt."""
MAX_POOLED_BYTES = 32 * 1024 * 1024
"""Maximum bytes of float32 results of one request: half of a message."""


class Pooling(Message):
    """The workers' task on a prompt's hidden states.

    `dimensions`: number of a vector's first elements to keep; 0: all. `use_activation`: normalise vectors, and apply
    the model's sigmoid or softmax to numbers. The tokens from `second_at` on are the second text of a pair, for models
    that distinguish them; 0: there is one text. The engine sets `reads_all` if the hidden states of all tokens are
    needed, so that no prefix may come from the cache.
    """

    task: PoolingTask
    dimensions: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    use_activation: bool = True
    second_at: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    reads_all: bool = True


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Pooling parameters of one prompt. Names and defaults are vLLM's.

    `task` defaults to that of the call. `dimensions` needs a model that was trained for shorter vectors (matryoshka),
    or one that does not state it. `use_activation`, formerly `normalize`, decides whether vectors are normalised and
    whether sigmoid or softmax is applied to numbers; the default is the model's.

    `truncate_prompt_tokens` keeps as many tokens of a longer prompt (-1: all that fit): the first ones, or with
    `truncation_side` "left" the last. The rest is as in SamplingParams. Raises ValueError with the name and the value.
    """

    task: PoolingTask | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    user: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def __post_init__(self) -> None:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        try:
            msgspec.convert(fields, _Checked)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `$.")
            name, chosen = place.rstrip("`"), not_chosen(error, _Checked)
            problem = problem if chosen is None else chosen.wanted
            raise ValueError(f"{name}: {problem}, got {fields.get(name)!r}") from None
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")

    def clone(self, **changes: Any) -> "PoolingParams":
        """A copy, with other values for the fields in `changes`."""
        return msgspec.structs.replace(self, **changes)

    @property
    def activation(self) -> bool | None:
        """Value of `use_activation` or `normalize`; None: neither is set."""
        return self.normalize if self.use_activation is None else self.use_activation


_Checked = msgspec.defstruct("_Checked", [(name, hint, None) for name, hint in PoolingParams.__annotations__.items()])
"""Struct that checks values by the annotations of PoolingParams."""


class PoolerInfo(Message):
    """Abilities of a model's pooler: its `tasks`, () without a pooler. `generates`: the model also generates text.

    `size` is the number of elements of a vector; `labels` name the numbers of a classification. `matryoshka` are the
    vector lengths that the model was trained for, () if unknown. `makes_pairs`: how two texts become one prompt: "pair"
    by the tokenizer, "template" by a text with both in it, "" not at all. `reads_last`: tasks without per-token results
    only need the hidden state of the last token. `normalizes`: vectors are normalised unless a request turns that off.
    `longest_text`: maximum tokens of a text whose vector is computed from several chunks; 0: it must fit the model.
    `tag_biases` are added to the scores of paths through the tags of spans, in the order of Calibration.
    """

    tasks: tuple[PoolingTask, ...] = ()
    generates: bool = True
    size: int = 0
    labels: tuple[str, ...] = ()
    matryoshka: tuple[int, ...] = ()
    makes_pairs: Literal["", "pair", "template"] = ""
    reads_last: bool = False
    normalizes: bool = True
    longest_text: int = 0
    tag_biases: tuple[float, ...] = ()

    def row_size(self, task: PoolingTask) -> int:
        """Number of results that a text, or each of its tokens, gets for `task`."""
        return self.size if task in ("embed", "token_embed") else len(self.labels)
