"""Forward: from a step's inputs to logits; the interface behind which eager execution and graphs are exchanged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import HostLens, StepBatch, to_device
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.models.registry import Model
from vllm_lite.worker.batch.step_inputs import StepInputs, StepStates

LEAST_PAIRS = 256 * 256
"""Number of (query, attended token) pairs that take one layer longer than planning attention a second time."""


HEAD_ROWS = 128
"""Maximum rows of one product with the LM head on a CPU: enough that reading its weight does not dominate, and few
enough that even the slowest kernels report progress with the largest vocabularies."""


class Forward(Protocol):
    """One way to run the model on a step."""

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Run the step. Returns float32 [num_samples, vocab_size], one row per sample, valid until the next call.

        The caller may write into it. The call does not wait for the device.
        """
        ...


class EagerForward:
    """Launches each operation separately. Runs any step, on any device."""

    def __init__(
        self,
        model: Model,
        kv_caches: list[Any],  # per layer, by `CacheEngine.layer_views`
        backend: AttentionBackend,
        device: torch.device,
        progress: Callable[[], None] = lambda: None,  # called once a layer, and for each product with the head
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.backend = backend
        self.device = device
        self.progress = progress
        self.num_last = 0
        """Rows of the last step that passed what follows the last attention, however that step ran."""
        self._shares_kv = any(layer.kv_layer is not None for layer in model.spec.layers)
        self._spares_last = device.type == "cpu" and model.spec.implementation != "transformers"

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Compute logits of the sampled rows only."""
        return self.head(self.hidden(inputs))

    def head(self, hidden: torch.Tensor, which: Which | None = None) -> torch.Tensor:
        """Multiply the rows `which` (None: all) of `hidden` [num_rows, hidden_size] with the LM head, on a CPU at most
        HEAD_ROWS at a time. Returns float32 [selected rows, vocab_size]."""
        if isinstance(which, slice):
            first, last, _ = which.indices(len(hidden))
            which = None if (first, last) == (0, len(hidden)) else np.arange(first, last)
        num_rows = len(hidden) if which is None else len(which)
        if self.device.type != "cpu" or num_rows <= HEAD_ROWS:
            own = hidden if which is None else hidden[self._to_device(which)]
            logits = self.model.logits(own, which=which)
            self.progress()
            return logits
        logits, numbers = self.model.empty_logits(num_rows), np.arange(num_rows) if which is None else which
        for first in range(0, num_rows, HEAD_ROWS):
            part = numbers[first : first + HEAD_ROWS]
            self.model.logits(hidden[part], logits[first : first + HEAD_ROWS], part)
            self.progress()
        return logits

    def hidden(self, inputs: StepInputs) -> torch.Tensor:  # [num_wanted, hidden_size]
        batch = self._batch(inputs)
        batch.token_types = None if (types := inputs.token_types) is None else self._to_device(types)
        batch.wanted = None if (wanted := inputs.wanted) is None else self._to_device(wanted)
        batch.states = None if inputs.states is None else Segments(*map(self._to_device, inputs.states))
        batch.tentative = None if (tokens := inputs.tentative) is None else self._to_device(tokens)
        batch.vectors, batch.images = inputs.vectors, inputs.images
        if wanted is not None and (tail := self.tail(inputs, wanted)) is not None:
            batch.tail = self._batch(tail)
        self.num_last = inputs.num_tokens if wanted is None else len(wanted)
        self.backend.prepare(batch)
        return self.model.forward(batch, self.kv_caches, self.backend, self.progress)

    def _batch(self, inputs: StepInputs) -> StepBatch:
        """The tokens of a step, without what only some steps have."""
        return StepBatch(
            num_tokens=inputs.num_tokens,
            num_seqs=len(inputs.rows),
            max_query_len=int(inputs.num_scheduled.max()),
            max_seq_len=int(inputs.seq_lens.max()),
            token_ids=self._to_device(inputs.input_ids) if (ids := inputs.device_ids) is None else ids,
            positions=self._to_device(inputs.positions),
            query_start_loc=self._to_device(inputs.query_start_loc),
            seq_lens=self._to_device(inputs.seq_lens),
            block_tables=tuple(self._to_device(table) for table in inputs.block_tables),
            slot_mapping=tuple(self._to_device(slots) for slots in inputs.slot_mapping),
            host=HostLens(inputs.num_scheduled, inputs.seq_lens, inputs.block_tables),
        )

    def tail(self, inputs: StepInputs, wanted: NDArray[np.int64]) -> StepInputs | None:
        """The sampled tokens, the last of their sequences, as a step of their own, if planning attention for them pays
        and no others are `wanted`."""
        own = inputs.sampling
        if len(own) == 0 or len(wanted) != inputs.num_samples.sum() or not self._pays(inputs):
            return None
        starts = np.zeros(len(own) + 1, np.int32)
        inputs.num_samples.cumsum(out=starts[1:])
        return replace(
            inputs,
            rows=inputs.rows[own],
            num_scheduled=inputs.num_samples,
            input_ids=inputs.input_ids[wanted],
            positions=inputs.positions[wanted],
            slot_mapping=tuple(slots[wanted] for slots in inputs.slot_mapping),
            block_tables=tuple(table[own] for table in inputs.block_tables),
            query_start_loc=starts,
            seq_lens=inputs.seq_lens[own],
            device_ids=None,
        )

    def _pays(self, inputs: StepInputs) -> bool:
        """Whether many layers write no KV, or (on a CPU) the last one that does would attend to many tokens."""
        if self._shares_kv or not self._spares_last:
            return self._shares_kv
        seq_lens = inputs.seq_lens.astype(np.int64)
        return int(inputs.num_scheduled @ seq_lens - inputs.num_samples @ seq_lens[inputs.sampling]) >= LEAST_PAIRS

    def take_up(self, tokens: NDArray[np.int64], states: StepStates) -> None:
        """Update recurrent states with accepted draft tokens: indices among the last step's tentative tokens."""
        self.model.take_up(self._to_device(tokens), Segments(*map(self._to_device, states)), self.kv_caches)

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        return to_device(array, self.device)
