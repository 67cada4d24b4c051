"""Every error a user can meet, in one tree. Each message says what was wrong, which value, and what would be right.

VllmLiteError
 +-- ConfigError        a flag, environment variable, file key or keyword is wrong
 +-- ModelError         a checkpoint cannot be served
 +-- RequestError       one request cannot be served; no other request notices
 +-- ProtocolError      a message that is malformed, too large, or of another protocol version
 +-- OutOfBlocks        the KV pool has fewer free blocks than were asked for (also a ValueError)
 +-- RemoteError        a server that is spoken to over HTTP cannot be reached, refuses, or breaks off
 +-- EngineError        the engine could not be started or reached
      +-- EngineDeadError   the engine (or a worker of it) died while requests were running
"""


class VllmLiteError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(VllmLiteError):
    """A configuration value is unknown, of the wrong type, or out of range."""


class ModelError(VllmLiteError):
    """A checkpoint is missing, damaged, or of a kind that is not supported."""


class RequestError(VllmLiteError):
    """One request is invalid or can never be served."""


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
