"""ModelDrafter: drafts with another, smaller model that has the same vocabulary.

It has K and V of all tokens, in its own layers of the same blocks, which are allocated, shared, hashed, swapped and
freed together with the model's. It computes a sequence's tokens only when drafts are wanted: first the whole prompt, in
pieces that fit into a step, later the new tokens. `Coverage` counts the tokens that it has computed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_lite.checkpoint.draft_model import kept_layers, read_draft_spec, with_drafter
from vllm_lite.errors import ModelError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.registry import Model, Sizes, build
from vllm_lite.models.weights import load_weights
from vllm_lite.protocol.step import Handle
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.batch.step_inputs import Int32s, StepInputs
from vllm_lite.worker.drafting.chain import Chain, Pass
from vllm_lite.worker.drafting.coverage import Coverage
from vllm_lite.worker.drafting.frequent import FrequentWords, add_frequent_head
from vllm_lite.worker.drafting.layered import LayeredDrafter, recorded
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.sampling.drafter import NO_TOKENS, DraftBatch, DrawnStep
from vllm_lite.worker.step_parts.rules import Rules

FEW_TOKENS = 16
"""Maximum missing tokens of a sequence that are computed together with the first draft; more are computed by separate
passes."""


class ModelDrafter(LayeredDrafter):
    """Drafts with a separate model, one pass for each draft."""

    follows = True
    _model: Decoder
    chain: Chain  # by `attach`
    _rows: Rows
    coverage: Coverage

    def __init__(self, speculation: Speculation) -> None:
        if speculation.model is None:
            raise ModelError("a draft model is required; name one")
        self._folder, self._quantization = speculation.model, speculation.quantization
        self.spec = read_draft_spec(self._folder)
        self.kv_layers = kept_layers(self.spec)
        self._tentative: dict[Handle, tuple[int, int]] = {}
        """Sequence with drafts in this step -> its length without them, and the end of the positions with KV."""

    def make(self, place: DraftPlace) -> Model:
        config = place.config
        with_drafter(config, place.spec, self.spec)  # refuses models that do not fit together
        # Rope tables and learned positions end at the draft model's own maximum: longer sequences have no drafts.
        self._max_len = min(place.limits.max_model_len, self.spec.max_position_embeddings)
        sizes = Sizes(self._max_len, place.limits.max_num_tokens, exact_activations=config.exact_activations)
        device, communicator = place.device.torch, place.model.communicator
        model = build(self.spec, place.dtype, device, sizes, self._quantization, communicator)
        load_weights(model, self._folder, load_format=config.load_format, seed=config.seed, progress=place.loaded)
        if not isinstance(model, Decoder):
            raise TypeError(f"{type(model).__name__} is no decoder, and cannot draft")
        add_frequent_head(model, model, place, self._folder, config.load_format)
        return model

    def attach(self, rows: Rows, rules: Rules) -> None:
        self._rows, self.coverage = rows, Coverage(rows, self._groups)
        forward = recorded(self._eager, self._place)
        self.chain = Chain(forward, self.sampler(), rows, rules, self._groups)
        self.chain.by_places = True
        self.chain.words = FrequentWords.of(self._model.lm_head, forward)

    def rehearse(self, step: StepInputs) -> None:
        self.chain.rehearse(step)

    # ---- a step

    def moves(self, block_ops: Sequence[tuple[int, int, int]]) -> None:
        self.coverage.move(block_ops)

    def begin_step(self) -> None:
        scheduled = [self._rows.sequences[handle].row for handle in self._rows.scheduled]
        self.coverage.lower(np.array(scheduled, np.int64))

    def before(self, batch: DraftBatch) -> Sequence[Int32s]:
        """Compute missing tokens, and draft for the sequences of which the draft model then lacks only the last tokens.
        The others get their drafts in a later step."""
        drafts = [NO_TOKENS] * len(batch.handles)
        rows = [self._rows.row_of(handle, "a draft") for handle in batch.handles]
        most = [
            min(count, self._max_len - len(tokens) + 1)
            for count, tokens in zip(batch.max_drafts, batch.tokens, strict=True)
        ]
        starts = self._catch_up(batch, rows, most)
        chosen = [index for index, start in enumerate(starts) if start is not None]
        if not chosen:
            return drafts
        found = self.chain.draft(
            replace(batch.some(chosen), max_drafts=[most[index] for index in chosen]),
            np.array([start for start in starts if start is not None], np.int64),
        )
        for index, drafted in zip(chosen, found, strict=True):
            row, known = rows[index], int(self._rows.num_tokens[rows[index]])
            self.coverage.raise_to(row, known)
            # The last draft is not computed. Forced tokens are drafts, too.
            end = len(batch.tokens[index]) + max(0, len(drafted) - 1)
            self._tentative[batch.handles[index]] = known, end
            drafts[index] = drafted
        return drafts

    def _catch_up(self, batch: DraftBatch, rows: list[int], most: list[int]) -> list[int | None]:
        """Compute missing tokens of sequences, up to the maximum of a step. Returns the first position of each that the
        pass of its first draft computes; None: too many are still missing."""
        room = self._place.limits.max_num_tokens
        starts: list[int | None] = [None] * len(rows)
        parts: list[tuple[int, int, int]] = []  # sequence, first position, end
        for index, (row, tokens) in enumerate(zip(rows, batch.tokens, strict=True)):
            if most[index] < 1:
                continue
            last = len(tokens) - 1
            start = self.coverage.of(row, min(last, int(self._rows.num_tokens[row])))
            if last - start < FEW_TOKENS:
                starts[index] = start
                continue
            end = min(last, start + room)
            room -= end - start
            if end > start:
                parts.append((index, start, end))
            starts[index] = end if end == last else None
        if parts:
            self._compute(batch, rows, parts)
        return starts

    def _compute(self, batch: DraftBatch, rows: list[int], parts: list[tuple[int, int, int]]) -> None:
        """Write K and V of these tokens."""
        own = Pass(
            [batch.handles[index] for index, _, _ in parts],
            np.array([rows[index] for index, _, _ in parts], np.int64),
            np.array([start for _, start, _ in parts], np.int64),
            [batch.tokens[index][start:end] for index, start, end in parts],
        )
        self._eager.hidden(self.chain.inputs(own, draws=False))
        for index, _, end in parts:
            self.coverage.raise_to(rows[index], min(end, int(self._rows.num_tokens[rows[index]])))

    def after(self, step: DrawnStep) -> None:
        """Count the KV of accepted drafts."""
        tentative, self._tentative = self._tentative, {}
        if not tentative:
            return
        for handle, length in zip(step.handles, step.lengths.tolist(), strict=True):
            known, end = tentative.get(handle, (0, 0))
            if known < length - 1:
                self.coverage.raise_to(self._rows.row_of(handle, "a draft"), min(length - 1, end))
