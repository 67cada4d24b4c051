"""Client -> engine: questions about requests by their external ids, under which users know them; and the answers.

They are for several API servers of one engine: each answers for all requests.
"""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

ExternalId = Annotated[str, Meta(max_length=256)]
"""Empty if the request has none."""
MAX_FOUND = 4096
"""The most external ids that one question is about."""


class FindExternal(Message, tag="find_external"):
    """Asks which of these external ids have live requests, of any client; answered by ExternalFound."""

    external_ids: Annotated[tuple[ExternalId, ...], Meta(max_length=MAX_FOUND)]


class ExternalFound(Message, tag="external_found"):
    """The external ids that were asked for and have live requests, in the order of the question."""

    external_ids: list[str]


class AbortExternal(Message, tag="abort_external"):
    """End the requests that have an external id, of any client; answered by ExternalAborted.

    Their streams end as by Abort.
    """

    external_id: ExternalId


class ExternalAborted(Message, tag="aborted"):
    """The number of live requests that had the external id, and end now."""

    num_requests: int
