"""ExpertLoad: counts the tokens per layer and expert, with --expert-load-metrics.

Each layer then writes its routing choices to memory of its own instead of a shared buffer, and a step is counted at
once when it is done. So kernels, recorded programs and graphs need no change. Every rank computes all routers in full;
rank 0 counts, including the experts that other ranks hold.
"""

from collections.abc import Sequence

import torch

from vllm_lite.layers.moe.experts import SparseMLP
from vllm_lite.models.registry import Model
from vllm_lite.protocol.step import Entry
from vllm_lite.worker.batch.part import StepPart, StepResult
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.forward import EagerForward


class ExpertLoad(StepPart):
    """Counts for one model since its start. It has no columns."""

    def __init__(
        self, layers: dict[int, SparseMLP], sizes: tuple[int, int], max_num_tokens: int, device: torch.device
    ) -> None:
        """`layers`: index -> layer, of layers with experts, which write their choices here from now on. `sizes`: number
        of layers, and index of the last layer whose attention computes all tokens of a step."""
        spec = next(iter(layers.values())).router.routing.spec
        self._layers, (self._num_layers, last), self._num_experts = list(layers), sizes, spec.num_experts
        self._num_whole = sum(index < last for index in layers)
        # After each step, the rows that are counted have been written by this step.
        shape = len(layers), max_num_tokens, spec.experts_per_token
        self._chosen = torch.zeros(shape, dtype=torch.int32, device=device)
        first = torch.arange(len(layers), dtype=torch.int32, device=device) * spec.num_experts
        self._first = first[:, None, None]
        self._counts = torch.zeros(len(layers) * spec.num_experts, dtype=torch.int64)
        for layer, kept in zip(layers.values(), self._chosen, strict=True):
            layer.kept = kept

    @classmethod
    def of(cls, model: Model, max_num_tokens: int, device: torch.device) -> "ExpertLoad | None":
        """The counter of a model; None if it has no experts."""
        blocks = [getattr(layer, "mlp", None) for layer in getattr(model, "layers", ())]
        sparse = {index: block for index, block in enumerate(blocks) if isinstance(block, SparseMLP)}
        sizes = len(blocks), getattr(model, "last_reader", len(blocks) - 1)
        return cls(sparse, sizes, max_num_tokens, device) if sparse else None

    def follow(self, forward: EagerForward) -> None:
        """Count steps that run by `forward`, or by graphs captured from it."""
        self._forward = forward

    def after_sample(self, inputs: StepInputs, result: StepResult) -> None:  # noqa: ARG002
        """Count the step, which the device has finished, since its tokens are here."""
        self.count(inputs.num_tokens, self._forward.num_last)

    def can_run_ahead(self, entries: Sequence[Entry]) -> bool:  # noqa: ARG002
        return False  # a step is counted when it is done

    @torch.inference_mode()
    def count(self, num_tokens: int, num_wanted: int) -> None:
        """Add a step of `num_tokens` tokens, of which `num_wanted` passed the layers after the last attention (all if a
        graph was replayed). Waits for the device if it has not finished the step."""
        self._add(slice(0, self._num_whole), num_tokens)
        self._add(slice(self._num_whole, None), num_wanted)

    def _add(self, layers: slice, num_tokens: int) -> None:
        chosen = self._chosen[layers, :num_tokens] + self._first[layers]
        self._counts += torch.bincount(chosen.flatten(), minlength=len(self._counts)).cpu()

    def tokens(self) -> list[list[int]]:
        """Tokens per expert of each layer; [] for a layer without experts. May be called by any thread."""
        by_layer = iter(self._counts.view(-1, self._num_experts).tolist())
        return [next(by_layer) if index in self._layers else [] for index in range(self._num_layers)]
