"""Media in a worker: their vectors are computed before the forward pass, kept by digest as long as the engine says, and
put in the place of those of the placeholder tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import TokenVectors, WholeImage, to_device
from vllm_lite.checkpoint.layer_specs.vision import QwenVisionSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ProtocolError
from vllm_lite.layers.vision.tower import VisionTower
from vllm_lite.protocol.encoder import MIN_ROOM, DemoteEncoded, Encode, FreeEncoded, PromoteEncoded
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import Fork, Handle, NewRequest
from vllm_lite.protocol.transfers import LoadEncoded
from vllm_lite.worker.batch.part import Handler, StepPart
from vllm_lite.worker.batch.rows import SequenceState
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.step_parts.image_positions import ImagePositions


class MediaVectors(StepPart):
    """Runs one tower. `progress` is called behind each of its layers."""

    def __init__(self, tower: VisionTower[Any], progress: Callable[[], None]) -> None:
        self.tower = tower
        self.progress = progress
        self.num_encoded = 0
        self._wanted: list[Encode] = []
        self._vectors: dict[bytes, torch.Tensor] = {}  # by digest: [num_vectors, hidden_size of the text]
        self._places: dict[bytes, NDArray[np.int64]] = {}  # by digest, where tokens are without: [num_vectors]
        self._media: dict[Handle, tuple[Media, ...]] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Encode: self._wanted.append,
            FreeEncoded: self._free,
            DemoteEncoded: lambda entry: self._move(entry, torch.device("cpu")),
            PromoteEncoded: lambda entry: self._move(entry, self.tower.device),
        }

    def _move(self, entry: DemoteEncoded | PromoteEncoded, place: torch.device) -> None:
        """Move vectors. A transfer that reads them at the time has the ones in the old place."""
        for digest in entry.digests:
            self._vectors[digest] = self._vectors[digest].to(place)

    def _free(self, entry: FreeEncoded) -> None:
        gone = set(entry.digests)
        self._wanted[:] = [each for each in self._wanted if each.digest not in gone]
        for digest in gone:
            self._vectors.pop(digest, None)
            self._places.pop(digest, None)

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        media = entry.media if isinstance(entry, NewRequest) else self._media.get(entry.parent, ())
        if media:
            self._media[sequence.handle] = media

    def close(self, sequence: SequenceState) -> None:
        self._media.pop(sequence.handle, None)

    def build(self, inputs: StepInputs) -> None:
        """Compute what has been asked for, and find the vectors of the step's placeholders."""
        if self._wanted:
            self._encode()
        rows, vectors = list[NDArray[np.int64]](), list[torch.Tensor]()
        images, are_whole = list[WholeImage](), self.tower.spec.whole_in != "no layers"
        for index, handle in enumerate(inputs.handles):
            start, end = int(inputs.starts[index]), int(inputs.seq_lens[index])
            for medium in self._media.get(handle, ()):
                first, last = max(start, medium.start), min(end, medium.end)
                if first >= last:
                    continue
                if (own := self._vectors.get(medium.digest)) is None:
                    raise ProtocolError(f"handle {handle} computes a medium at {medium.start} that was not encoded")
                places, within = np.arange(first, last), slice(first - medium.start, last - medium.start)
                if (some := self._places.get(medium.digest)) is not None:
                    within = slice(*np.searchsorted(some, (within.start, within.stop)))
                    places = some[within] + medium.start
                rows.append(places + (int(inputs.query_start_loc[index]) - start))
                vectors.append(own[within])
                if are_whole:
                    if last < medium.end:
                        raise ProtocolError(f"handle {handle} ends a step at {last}, inside a medium to {medium.end}")
                    row = first - start + int(inputs.query_start_loc[index])
                    images.append(WholeImage(index, row, last - first, last))
        if rows:
            inputs.images = tuple(images)
            inputs.vectors = TokenVectors(to_device(np.concatenate(rows), self.tower.device), torch.cat(vectors))

    def _encode(self) -> None:
        wanted, images = list(self._wanted), list[torch.Tensor]()
        self._wanted.clear()
        for entry in wanted:
            try:
                height, width = self.tower.shape(entry.num_tokens, entry.grid)
            except ValueError as error:
                raise ProtocolError(str(error)) from error
            if len(entry.content) != height * width * 3:
                raise ProtocolError(f"a medium of {len(entry.content)} bytes for {height} x {width} pixels")
            colors = np.frombuffer(entry.content, np.uint8).reshape(height, width, 3)
            images.append(torch.from_numpy(colors.copy()))
        for entry, vectors in zip(wanted, self.tower.encode(images, self.progress), strict=True):
            self._keep(entry, self.tower.arranged(vectors, entry.grid).clone())
        self.num_encoded += len(wanted)

    def _keep(self, medium: Encode | LoadEncoded, vectors: torch.Tensor) -> None:
        if (places := self.tower.places(medium.num_tokens, medium.grid)) is not None:
            self._places[medium.digest] = places.numpy()
        self._vectors[medium.digest] = vectors

    # ---- as a shelf of vectors that come from elsewhere, and go there

    def get(self, digest: bytes) -> torch.Tensor | None:
        return self._vectors.get(digest)

    def room(self, medium: LoadEncoded) -> torch.Tensor:
        tower, places = self.tower, self.tower.places(medium.num_tokens, medium.grid)
        count = medium.num_tokens if places is None else len(places)
        return torch.empty((count, tower.spec.out_size), dtype=tower.dtype, device=tower.device)

    def put(self, medium: LoadEncoded, vectors: torch.Tensor) -> None:
        self._keep(medium, vectors)

    def check_integrity(self) -> None:
        unknown = self._media.keys() - self.rows.sequences.keys()
        if unknown:
            raise RuntimeError(f"media of handles {sorted(unknown)}, which no sequence has")


def media_parts(tower: VisionTower[Any], progress: Callable[[], None]) -> list[StepPart]:
    """The parts of a model that sees images."""
    parts: list[StepPart] = [MediaVectors(tower, progress)]
    if isinstance(tower.spec, QwenVisionSpec):
        parts.append(ImagePositions(tower.spec.merge))
    return parts


def encode_largest(tower: VisionTower[Any], max_num_tokens: int) -> torch.Tensor:
    """Run a tower over as much as a step gives it. Returns memory for all vectors that are ever held."""
    room = max(MIN_ROOM, max_num_tokens)
    held = torch.empty(room, tower.spec.out_size, dtype=tower.dtype, device=tower.device)
    tower.encode(tower.largest(max_num_tokens))
    return held


def media_facts(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of Ready by which clients and engine know the media that the model takes."""
    own = spec.vision
    if own is None:
        return {}
    sizes = {"media_token_bytes": own.token_bytes, "media_bytes_vary": own.bytes_vary}
    sizes["media_vector_bytes"] = own.out_size * dtype.itemsize
    return {"placeholders": {"image": own.token_id}, "whole_media": own.whole_in != "no layers", **sizes}
