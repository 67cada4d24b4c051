"""KVWriter: writes K and V of a few tokens by a recorded pass without attention and logits, on a CPU.

A head's KV is written after each step, for the step's tokens. There is no attention, so the tokens may belong to any
sequences.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cpu.program import NotRecordable
from vllm_lite.runtime import log
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.graphs import DecodeInputs, Graph

logger = log.get(__name__)


class KVWriter:
    """Writes K and V of a model with few layers, of which only the first one has KV."""

    def __init__(self, eager: EagerForward, place: DraftPlace) -> None:
        self._eager = eager
        capture, sizes = place.device.capture, place.graph_sizes
        self._capture = capture if capture is not None and capture.on_demand else None
        self._largest = sizes[-1] if sizes and self._capture is not None else 0
        self._inputs = DecodeInputs(max(1, self._largest), 1, len(eager.model.spec.kv_groups), eager.device)
        self._graphs: dict[int, tuple[Graph, NDArray[np.int64]] | None] = {}
        """Number of tokens -> a recorded pass and its input memory, [2 + num_groups, num_tokens]; None if it cannot be
        recorded."""

    def write(self, inputs: StepInputs) -> bool:
        """Write K and V of all tokens of the step, whose slots are for the drafting model's own groups. Returns False
        and does nothing if passes of this number of tokens are not recorded."""
        count = inputs.num_tokens
        if inputs.vectors is not None or count > self._largest:
            return False
        if count not in self._graphs:
            self._graphs[count] = self._record(count)
        recorded = self._graphs[count]
        if recorded is None:
            return False
        graph, numbers = recorded
        numbers[0], numbers[1] = inputs.input_ids, inputs.positions
        for group, slots in enumerate(inputs.slot_mapping, start=2):
            numbers[group] = slots
        graph.replay()
        return True

    @torch.inference_mode()
    def _record(self, count: int) -> tuple[Graph, NDArray[np.int64]] | None:
        eager, capture = self._eager, self._capture
        if capture is None:
            return None
        self._inputs.load(None, count)
        batch = self._inputs.batch(count, 1)
        batch.wanted = torch.zeros(0, dtype=torch.int64)
        eager.backend.prepare(batch)  # without tokens, because there is no attention

        def run() -> None:
            eager.model.forward(batch, eager.kv_caches, eager.backend, eager.progress)

        try:
            graph = capture(lambda: None, run)
        except NotRecordable as error:
            logger.debug("KV writes of %d tokens are not recorded and run eagerly: %s", count, error)
            return None
        return graph, self._inputs.host(count)[0]
