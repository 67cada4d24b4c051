"""The vectors of a medium as one item of a file."""

from typing import Protocol

import torch

from vllm_lite.protocol.transfers import LoadEncoded
from vllm_lite.worker.disk.items import DeviceItems, HostItems, items_of


class MediaShelf(Protocol):
    """Keeps vectors by the digests of their media, for steps and for transfers beside them."""

    def get(self, digest: bytes) -> torch.Tensor | None:
        """The vectors of a medium, [num_vectors, elements]; None: they have been forgotten."""

    def room(self, medium: LoadEncoded) -> torch.Tensor:
        """Memory for the vectors of a medium that is to come, as `get` would return them."""

    def put(self, medium: LoadEncoded, vectors: torch.Tensor) -> None:
        """Keep vectors; called by any thread."""


def one_item(vectors: torch.Tensor) -> HostItems | DeviceItems:
    """The vectors of one medium, contiguous, as the item 0."""
    return items_of(vectors[None])
