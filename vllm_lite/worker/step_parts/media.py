"""Media in a worker: their vectors are computed before the forward pass, kept by digest until the engine frees them,
and replace the embeddings of placeholder tokens."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import TokenVectors, WholeImage, to_device
from vllm_lite.checkpoint.layer_specs.qwen_vision import QwenVisionSpec
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.errors import ProtocolError
from vllm_lite.layers.vision.tower import Pieces, VisionTower, drained
from vllm_lite.protocol.encoder import (
    GROWTH_ASIDE,
    MIN_ROOM,
    DemoteEncoded,
    Encode,
    EncodeAside,
    FreeEncoded,
    PromoteEncoded,
)
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import Entry, Fork, Handle, NewRequest
from vllm_lite.protocol.transfers import LoadEncoded
from vllm_lite.worker.batch.part import Handler, StepPart
from vllm_lite.worker.batch.rows import SequenceState
from vllm_lite.worker.batch.step_inputs import Int64s, StepInputs
from vllm_lite.worker.step_parts.image_positions import ImagePositions

GOAL = 0.9
"""Share of the goal for the time between tokens that a worker's step may take; the rest is for making and sending
answers."""
SHARE_BESIDE = 0.5
"""Share of the time for media computed aside that they get in a step that also computes tokens of prompts."""
PIECE_DECAY = 0.98
"""Factor of the remembered time of a long piece after each shorter one; some dozens follow until the next long one."""


class MediaVectors(StepPart):
    """Runs one tower. Calls `progress` after each of its layers.

    Media that are computed aside advance by some pieces in each step, one medium after another, as long as there is
    time. Ranks may differ in their progress, so a medium that a step reads is completed first.
    """

    def __init__(self, tower: VisionTower[Any], progress: Callable[[], None], max_itl_s: float = 0.0) -> None:
        """`max_itl_s`: the goal for the time between tokens, which steps with media computed aside keep to."""
        self.tower = tower
        self.progress = progress
        self.max_itl_s = max_itl_s
        self.num_encoded = 0
        self._wanted: list[Encode] = []
        self._aside: dict[bytes, tuple[EncodeAside, Pieces]] = {}
        self._ended: list[bytes] = []
        """Digests of media whose computation aside has ended, for the next answer."""
        self._media_s = 0.0
        """Time that media took since the last answer."""
        self._started_s = self._piece_s = 0.0
        """Start of the current forward pass, and time of a long piece."""
        self._took_s = {True: 0.0, False: math.inf}
        """Time of the last forward pass, by whether it computed only next tokens, without tokens of prompts."""
        self._vectors: dict[bytes, torch.Tensor] = {}  # by digest: as VisionTower.arranged gives them
        self._places: dict[bytes, NDArray[np.int64]] = {}  # by digest, where tokens are without: [num_vectors]
        self._media: dict[Handle, tuple[Media, ...]] = {}

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Encode: self._wanted.append,
            EncodeAside: self._begin,
            FreeEncoded: self._free,
            DemoteEncoded: lambda entry: self._move(entry, torch.device("cpu")),
            PromoteEncoded: lambda entry: self._move(entry, self.tower.device),
        }

    def _begin(self, entry: EncodeAside) -> None:
        self._aside[entry.digest] = entry, self.tower.in_pieces(self._image(entry))
        self.rows.changed = True  # nothing is built for steady steps, so none is one until all media are done

    def _move(self, entry: DemoteEncoded | PromoteEncoded, place: torch.device) -> None:
        """Move vectors. A transfer that is reading them keeps the old tensors."""
        for digest in entry.digests:
            self._vectors_of(digest)  # this rank may still compute it aside
            self._vectors[digest] = self._vectors[digest].to(place)

    def _free(self, entry: FreeEncoded) -> None:
        gone = set(entry.digests)
        self._wanted[:] = [each for each in self._wanted if each.digest not in gone]
        for digest in gone:
            self._vectors.pop(digest, None)
            self._aside.pop(digest, None)
            self._places.pop(digest, None)

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        return not (self._aside or self._ended)

    def open(self, sequence: SequenceState, entry: NewRequest | Fork) -> None:
        media = entry.media if isinstance(entry, NewRequest) else self._media.get(entry.parent, ())
        if media:
            self._media[sequence.handle] = media

    def close(self, sequence: SequenceState) -> None:
        self._media.pop(sequence.handle, None)

    def build(self, inputs: StepInputs) -> None:
        """Compute the requested media, and find the vectors of the step's placeholders."""
        if self._aside:
            self._advance(self._time_aside(inputs))
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
                if (own := self._vectors_of(medium.digest)) is None:
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
            plain, *deep = torch.cat(vectors).split(self.tower.spec.out_size, 1)
            inputs.vectors = TokenVectors(to_device(np.concatenate(rows), self.tower.device), plain, tuple(deep))

    def prepare(self, inputs: StepInputs) -> None:  # noqa: ARG002
        self._started_s = time.perf_counter()

    def commit(self, inputs: StepInputs, tokens: Int64s, num_kept: Int64s | None) -> None:  # noqa: ARG002
        if self._started_s:  # else it was launched ahead, and has not ended
            self._took_s[_is_plain(inputs)], self._started_s = time.perf_counter() - self._started_s, 0.0

    def answer(self, inputs: StepInputs, fields: dict[str, Any]) -> None:  # noqa: ARG002
        if self._ended:
            fields["encoded"], self._ended = self._ended, []
        fields["other_s"], self._media_s = self._media_s, 0.0

    def _time_aside(self, inputs: StepInputs) -> float:
        """Time in a step for media computed aside: the goal minus the time of the last such step, or, without a goal, a
        share of the time of a step of next tokens."""
        if self.max_itl_s:
            return GOAL * self.max_itl_s - self._took_s[_is_plain(inputs)]
        share = 1.0 if _is_plain(inputs) else SHARE_BESIDE
        return share * GROWTH_ASIDE * self._took_s[True]

    def _advance(self, seconds: float) -> None:
        """Advance media aside while there is time for one more piece, but by at least one piece."""
        start_s = now_s = time.perf_counter()
        until_s = start_s + seconds
        while self._aside:
            entry, pieces = next(iter(self._aside.values()))
            try:
                next(pieces)
            except StopIteration as end:
                self._has_ended(entry, end.value)
            began_s, now_s = now_s, time.perf_counter()
            self._piece_s = max(now_s - began_s, PIECE_DECAY * self._piece_s)
            if now_s + self._piece_s >= until_s:
                break
        self.progress()
        self._has_taken(now_s - start_s)

    def _has_taken(self, seconds: float) -> None:
        self._media_s += seconds if self.tower.device.type == "cpu" else math.inf
        self.rows.changed = True  # a steady step has no answer of this part

    def _has_ended(self, entry: EncodeAside, vectors: torch.Tensor) -> None:
        del self._aside[entry.digest]
        self._has_computed(entry, vectors)
        self._ended.append(entry.digest)

    def _vectors_of(self, digest: bytes) -> torch.Tensor | None:
        if (found := self._aside.get(digest)) is not None:
            (entry, pieces), start_s = found, time.perf_counter()
            self._has_ended(entry, drained(pieces, self.progress))
            self._has_taken(time.perf_counter() - start_s)
        return self._vectors.get(digest)

    def _has_computed(self, entry: Encode | EncodeAside, vectors: torch.Tensor) -> None:
        self._keep(entry, self.tower.arranged(vectors, entry.grid).clone())
        self.num_encoded += 1

    def _image(self, entry: Encode | EncodeAside) -> torch.Tensor:
        """The colors of a medium: uint8 [height, width, 3]."""
        try:
            height, width = self.tower.shape(entry.num_tokens, entry.grid)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if len(entry.content) != height * width * 3:
            raise ProtocolError(f"a medium of {len(entry.content)} bytes for {height} x {width} pixels")
        return torch.from_numpy(np.frombuffer(entry.content, np.uint8).reshape(height, width, 3).copy())

    def _encode(self) -> None:
        wanted, start_s = list(self._wanted), time.perf_counter()
        self._wanted.clear()
        images = [self._image(entry) for entry in wanted]
        for entry, vectors in zip(wanted, self.tower.encode(images, self.progress), strict=True):
            self._has_computed(entry, vectors)
        self._has_taken(time.perf_counter() - start_s)

    def _keep(self, medium: Encode | EncodeAside | LoadEncoded, vectors: torch.Tensor) -> None:
        if (places := self.tower.places(medium.num_tokens, medium.grid)) is not None:
            self._places[medium.digest] = places.numpy()
        self._vectors[medium.digest] = vectors

    # ---- methods of a shelf, for transfers of vectors

    def get(self, digest: bytes) -> torch.Tensor | None:
        """Return a medium's vectors, after completing them if this rank still computes them aside. Called by the
        worker's thread."""
        return self._vectors_of(digest)

    def room(self, medium: LoadEncoded) -> torch.Tensor:
        tower, places = self.tower, self.tower.places(medium.num_tokens, medium.grid)
        count = medium.num_tokens if places is None else len(places)
        return torch.empty((count, tower.spec.vector_size), dtype=tower.dtype, device=tower.device)

    def put(self, medium: LoadEncoded, vectors: torch.Tensor) -> None:
        self._keep(medium, vectors)

    def check_integrity(self) -> None:
        unknown = self._media.keys() - self.rows.sequences.keys()
        if unknown:
            raise RuntimeError(f"media of handles {sorted(unknown)}, which no sequence has")


def _is_plain(inputs: StepInputs) -> bool:
    """Whether a step computes only next tokens, and drafts after them."""
    return int(inputs.num_samples.sum()) == inputs.num_tokens


def media_parts(tower: VisionTower[Any], progress: Callable[[], None], max_itl_ms: float | None) -> list[StepPart]:
    """Make the step parts of a model that takes images."""
    parts: list[StepPart] = [MediaVectors(tower, progress, (max_itl_ms or 0.0) / 1000)]
    if isinstance(tower.spec, QwenVisionSpec):
        parts.append(ImagePositions(tower.spec.merge))
    return parts


def encode_largest(tower: VisionTower[Any], max_num_tokens: int) -> torch.Tensor:
    """Run a tower over the most media of a step. Returns memory of the size of all vectors that may be held."""
    room = max(MIN_ROOM, max_num_tokens)
    held = torch.empty(room, tower.spec.vector_size, dtype=tower.dtype, device=tower.device)
    tower.encode(tower.largest(max_num_tokens))
    return held


def media_facts(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of Ready that describe the model's media to engine and clients."""
    own = spec.vision
    if own is None:
        return {}
    sizes = {"media_token_bytes": own.token_bytes, "media_bytes_vary": own.bytes_vary}
    sizes["media_vector_bytes"] = own.vector_size * dtype.itemsize
    return {"placeholders": {"image": own.token_id}, "whole_media": own.whole_in != "no layers", **sizes}
