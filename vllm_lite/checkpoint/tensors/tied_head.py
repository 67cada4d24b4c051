"""has_own_head(): whether a checkpoint whose config.json ties the head to the embedding has another head in its files.
No torch.

Many models are tied by their family's default, and the config.json of one trained further with a separate head may not
say so. Its files show it: they have both tensors, with different values. transformers also follows the files.
"""

from pathlib import Path

from vllm_lite.checkpoint.tensors.headers import TensorPlace, locate
from vllm_lite.checkpoint.tensors.tensor_names import EMBEDDING, HEAD, canonical
from vllm_lite.errors import ModelError

CHUNK_BYTES = 1 << 20


def has_own_head(folder: Path) -> bool:
    """Whether the files of `folder` have an embedding and a head that differ.

    Without a head, as in most tied checkpoints, only headers are read; if both are equal, all of both. Missing or
    damaged files are False: the loader reports them.
    """
    try:
        places = {name: place for stored, place in locate(folder).items() if (name := canonical(stored)) in WANTED}
        return len(places) == len(WANTED) and not _equal(places[EMBEDDING], places[HEAD])
    except (ModelError, OSError):
        return False


WANTED = (EMBEDDING, HEAD)


def _equal(one: TensorPlace, other: TensorPlace) -> bool:
    """Whether both have equal bytes, type and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left = one.num_bytes
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        while left:
            size = min(left, CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True
