"""Media in prompts: their positions among the prompt's tokens, and digests of their contents.

A prompt is a list of spans, text or media. On the wire it is flat: the token ids of the whole prompt, with one
placeholder token per vector of a medium, and one Media struct for each medium. A prompt of only text has no Media.
"""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

MAX_MEDIA = 1024
"""Maximum number of media of one prompt."""
MAX_KIND_CHARS = 32


class Media(Message):
    """One medium in a prompt: the tokens [start, start + num_tokens).

    `digest` (blake2b-256) is of the model's input: the preprocessed content, and the preprocessing settings. Equal
    digests mean equal vectors; the prefix cache relies on it. `grid` is its size in patches (time, height, width), for
    models whose positions depend on it.
    """

    kind: Annotated[str, Meta(min_length=1, max_length=MAX_KIND_CHARS)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    num_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    start: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    grid: Annotated[tuple[Annotated[int, Meta(ge=1, lt=2**31)], ...], Meta(max_length=3)] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


PromptMedia = Annotated[tuple[Media, ...], Meta(max_length=MAX_MEDIA)]
"""The media of a prompt, in the order of their positions."""
