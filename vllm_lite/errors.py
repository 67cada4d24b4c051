"""Every error a user can meet, in one tree. Each message says what was wrong, which value, and what would be right.

VllmLiteError
 +-- ConfigError        a flag, environment variable, file key or keyword is wrong
 +-- ModelError         a checkpoint cannot be served
 +-- RequestError       one request cannot be served; no other request notices
 |    +-- ContextLengthError  it is longer than the context
 |    |    +-- PooledLengthError  it has a text to pool that is longer
 |    +-- GrammarError        its grammar cannot be followed
 +-- ProtocolError      a message that is malformed, too large, or of another protocol version
 +-- OutOfBlocks        the KV pool has fewer free blocks than were asked for (also a ValueError)
 +-- RemoteError        a server that is spoken to over HTTP cannot be reached, refuses, or breaks off
 +-- EngineError        the engine could not be started or reached
      +-- EngineDeadError   the engine (or a worker of it) died while requests were running
      +-- RankLostError     in a worker: another rank of its group has ended, or has not come in time
      +-- DeviceHungError   in a worker: its GPU has not finished the launched kernels in time
"""

from typing import Any


class VllmLiteError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(VllmLiteError):
    """A configuration value is unknown, of the wrong type, or out of range."""


class ModelError(VllmLiteError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""


class RequestError(VllmLiteError):
    """One request is invalid or can never be served."""


class ContextLengthError(RequestError):
    """A prompt, or the output asked for, is longer than the context.

    Clients recognise this error by phrases of its message and read the numbers in it: "maximum context length is N
    tokens", "you requested N output tokens", "prompt contains at least N input tokens", "prompt is too long".
    """

    def __init__(self, max_model_len: int, num_prompt: int, max_tokens: int | None) -> None:
        room = max_model_len - num_prompt
        short = f"the prompt is too long, shorten it to {max_model_len - 1} or fewer"
        advice = f"ask for max_tokens of {room} or fewer" if room > 0 else short
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but you requested {max_tokens or 0} "
            f"output tokens and your prompt contains at least {num_prompt} input tokens; {advice}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and all attributes. Python's own way calls __init__ with the message, so that a process
        pool waits forever."""
        return type(self).__new__, (type(self), *self.args), vars(self)


class PooledLengthError(ContextLengthError):
    """A text to pool is longer than the context. The message begins like that of ContextLengthError, but names no
    output tokens."""

    def __init__(self, max_model_len: int, num_tokens: int | None, where: str = "", *, may_cut: bool = True) -> None:
        """`num_tokens` is None if they were not counted to the end. `where` says which of several texts it is. Without
        `may_cut` the request does not allow truncating the text."""
        count = f"{num_tokens} tokens" if num_tokens is not None else "more"
        cut = "give truncate_prompt_tokens to keep some of them, -1 as many as fit"
        RequestError.__init__(
            self,
            f"{where}This model's maximum context length is {max_model_len} tokens, but the text has {count}; "
            f"{cut if may_cut else 'split the text'}",
        )


class GrammarError(RequestError):
    """A grammar cannot be compiled or followed: it has a fault, or is more work than the limits allow.

    The message begins with "the grammar": so one that comes from a worker is known to be the request's fault.
    """


class ProtocolError(VllmLiteError):
    """A message could not be decoded, exceeds a limit, or comes from another protocol version."""


class OutOfBlocks(VllmLiteError, ValueError):
    """More KV blocks were requested than are free; nothing was taken."""


class RemoteError(VllmLiteError):
    """A server that is spoken to over HTTP cannot be reached, refuses, or breaks off."""


class EngineError(VllmLiteError):
    """The engine could not be started or does not answer."""


class EngineDeadError(EngineError):
    """The engine or one of its workers died; the message names the root cause."""


class RankLostError(EngineError):
    """In a worker: another rank of its group has ended, or has not come in time. Never the root cause."""


class DeviceHungError(EngineError):
    """In a worker: its GPU has not finished the launched kernels in time."""
