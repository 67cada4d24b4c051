"""The vectors of a medium as one item of a file."""

from typing import Protocol

import torch

from vllm_lite.protocol.transfers import LoadEncoded
from vllm_lite.worker.disk.items import DeviceItems, HostItems, items_of


class MediaShelf(Protocol):
    """Stores vectors by the digests of their media, for steps and for transfers."""

    def get(self, digest: bytes) -> torch.Tensor | None:
        """Vectors of a medium, [num_vectors, elements]; None: they have been dropped."""

    def room(self, medium: LoadEncoded) -> torch.Tensor:
        """Allocate memory for the vectors of a medium, in the shape that get() returns."""

    def put(self, medium: LoadEncoded, vectors: torch.Tensor) -> None:
        """Store vectors; called by any thread."""


def one_item(vectors: torch.Tensor) -> HostItems | DeviceItems:
    """The vectors of one medium, contiguous, as the item 0."""
    return items_of(vectors[None])
