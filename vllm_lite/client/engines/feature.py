"""The seam at which something that engines do beside requests hangs onto a session."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm_lite.protocol.api import FromClient, Welcome


class SessionFeature(Protocol):
    """Follows the engine of a session, and those that take its place. It is called on the session's thread."""

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """The kinds of messages that it takes, and what takes them."""
        ...

    def again(self, welcome: Welcome) -> Sequence[FromClient]:
        """Return the messages that bring another engine, which said `welcome`, to where the one before it was. They
        are sent before all requests."""
        ...
