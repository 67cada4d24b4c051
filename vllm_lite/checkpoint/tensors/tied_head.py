"""Whether a head that config.json calls tied to the embedding is so in the files. No torch.

Many models of a family are tied by the family's default, and one that was trained further with a head of its own may
not say so. Its files do: they hold both tensors, with other values. transformers, too, believes the files.
"""

from pathlib import Path

from vllm_lite.checkpoint.tensors.headers import TensorPlace, locate
from vllm_lite.checkpoint.tensors.tensor_names import EMBEDDING, HEAD, canonical
from vllm_lite.errors import ModelError

CHUNK_BYTES = 1 << 20


def has_own_head(folder: Path) -> bool:
    """Whether the files of `folder` hold an embedding and a head that differ.

    Where there is no head, as in most tied checkpoints, only headers are read; where both are equal, all of both is.
    Files that are missing or damaged are False: who loads them says what is wrong.
    """
    try:
        places = {name: place for stored, place in locate(folder).items() if (name := canonical(stored)) in WANTED}
        return len(places) == len(WANTED) and not _equal(places[EMBEDDING], places[HEAD])
    except (ModelError, OSError):
        return False


WANTED = (EMBEDDING, HEAD)


def _equal(one: TensorPlace, other: TensorPlace) -> bool:
    """Whether both are the same bytes of the same type."""
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
