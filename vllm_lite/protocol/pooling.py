"""PoolingParams: what a user may ask of a model that makes vectors and scores. Pooling: what travels of it.

A request that is pooled generates nothing: it ends when all tokens of its prompt are computed, with what the model's
pooler makes of their hidden states.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]
"""embed: one vector; token_embed: a vector for each token; classify: a number for each label; token_classify: that for
each token; score: the only one."""
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "token_embed", "classify", "token_classify", "score")
TOKEN_TASKS: frozenset[PoolingTask] = frozenset({"token_embed", "token_classify"})
"""Tasks that give numbers for each token of a prompt."""
MAX_POOLED_BYTES = 32 * 1024 * 1024
"""Float32 numbers that one request gets, at most: half of what a message holds."""


class Pooling(Message):
    """The task of workers on a prompt's hidden states.

    `dimensions` keeps so many of a vector's first elements, 0 all of them. `use_activation`: a vector gets its norm 1,
    a number goes through the model's sigmoid or softmax. The tokens from `second_at` on are the second text of a pair,
    for models that distinguish them; 0: there is one text. The engine sets `reads_all`: hidden states of all tokens are
    needed, so none may be left out because its KV is cached.
    """

    task: PoolingTask
    dimensions: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    use_activation: bool = True
    second_at: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    reads_all: bool = True


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters for the pooling of one prompt. Names and defaults are those that vLLM's users know.

    `task` is what the call asks for, if it is not given here. `dimensions` needs a model that was trained for shorter
    vectors (matryoshka), or one that does not say. `use_activation`, older `normalize`, decides whether vectors get the
    norm 1 and whether numbers go through sigmoid or softmax; by default as the model says.

    `truncate_prompt_tokens` keeps so many tokens of a longer prompt, -1 as many as fit: its first ones, or its last
    ones with `truncation_side` "left". The rest is as in SamplingParams. Raises ValueError with the name and the value.
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
            name = place.rstrip("`")
            raise ValueError(f"{name}: {problem}, got {fields.get(name)!r}") from None
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0")

    def clone(self, **changes: Any) -> "PoolingParams":
        """A copy, with other values for the fields in `changes`."""
        return msgspec.structs.replace(self, **changes)

    @property
    def activation(self) -> bool | None:
        """The activation asked for under either name; None: none is."""
        return self.normalize if self.use_activation is None else self.use_activation


_Checked = msgspec.defstruct("_Checked", [(name, hint, None) for name, hint in PoolingParams.__annotations__.items()])
"""Checks values by the annotations of PoolingParams, which Python itself does not."""


class PoolerInfo(Message):
    """Abilities of a model's pooler: `tasks`, () if it has none. `generates`: the model also continues prompts.

    `size` counts the elements of a vector, `labels` names the numbers of a classification. `matryoshka` are the
    dimensions that it was trained for, () if it does not say. `makes_pairs`: how two texts become one prompt: "pair" by
    the tokenizer, "template" by a text with both in it, "" not at all. `reads_last`: a prompt's last token is enough
    for all tasks that give nothing for each token. `normalizes`: vectors get the norm 1 unless a request says
    otherwise. `longest_text`: tokens of a text whose vector is made of several chunks; 0: it must fit the model.
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
        """Numbers that a text, or each of its tokens, gets for `task`."""
        return self.size if task in ("embed", "token_embed") else len(self.labels)
