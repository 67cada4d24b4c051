"""Client <-> engine: queries about requests by external id, the id that users know.

Several API servers of one engine use them, so that each can answer for all requests.
"""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

ExternalId = Annotated[str, Meta(max_length=256)]
"""Empty if the request has none."""
MAX_FOUND = 4096
"""Maximum external ids in one query."""


class FindExternal(Message, tag="find_external"):
    """Ask which of these external ids have live requests, of any client; answered by ExternalFound."""

    external_ids: Annotated[tuple[ExternalId, ...], Meta(max_length=MAX_FOUND)]


class ExternalFound(Message, tag="external_found"):
    """The queried external ids that have live requests, in the order of the query."""

    external_ids: list[str]


class AbortExternal(Message, tag="abort_external"):
    """End the requests of any client with this external id; answered by ExternalAborted.

    Their streams end as by Abort.
    """

    external_id: ExternalId


class ExternalAborted(Message, tag="aborted"):
    """Number of live requests that had the external id, and end now."""

    num_requests: int
