"""AssistantDrafter: drafts with an assistant of Gemma 4, which reads the model's hidden states and its K and V.

It writes no KV: all drafts of a step are made at the position of the last token, over the K and V of the tokens before.
For each sequence it keeps the hidden state of the last computed token.
"""

from pathlib import Path

import torch

from vllm_lite.checkpoint.gemma4_assistant import read_assistant
from vllm_lite.checkpoint.model_spec import LayerGroup
from vllm_lite.errors import ConfigError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.gemma4_assistant import Gemma4Assistant
from vllm_lite.models.registry import Model, Sizes, make_parts
from vllm_lite.models.weights import load_weights
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.batch.rows import Rows
from vllm_lite.worker.drafting.frequent import add_frequent_head
from vllm_lite.worker.drafting.head import HeadDrafter
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.forward import EagerForward
from vllm_lite.worker.sampling.drafter import ComputedStep, KVViews
from vllm_lite.worker.step_parts.rules import Rules


class AssistantDrafter(HeadDrafter):
    """Drafts with an assistant, one pass for each draft."""

    _model: Gemma4Assistant

    def __init__(self, speculation: Speculation) -> None:
        if speculation.model is None:
            raise ConfigError("an assistant model is required; name one")
        self._folder, self._quantization = speculation.model, speculation.quantization
        self._assistant = read_assistant(self._folder)
        super().__init__(self._assistant.spec, ())

    def load(self, place: DraftPlace) -> None:
        self._shared = self._assistant.shared_layers(place.model.spec)
        super().load(place)
        if place.kv_scales:
            self._model.take_kv_scales([place.kv_scales[layer] for layer in self._shared])

    def tables(self, place: DraftPlace) -> tuple[tuple[int, ...], tuple[LayerGroup, ...]]:
        """See LayeredDrafter; here, the groups of those layers of the model whose K and V the assistant reads."""
        of_model = [self._shared[group.layers[0]] for group in self.spec.kv_groups]
        found = (
            next(index for index, group in enumerate(place.spec.kv_groups) if layer in group.layers)
            for layer in of_model
        )
        return tuple(found), self.spec.kv_groups

    def make(self, place: DraftPlace) -> Model:
        config, limits, model = place.config, place.limits, place.model
        if not isinstance(model, Decoder):
            raise ConfigError(f"an assistant drafts for decoders of this package, not for {type(model).__name__}")
        sizes = Sizes(limits.max_model_len, limits.max_num_tokens, exact_activations=config.exact_activations)
        parts = make_parts(self.spec, place.dtype, place.device.torch, sizes, self._quantization, model.communicator)
        assistant = Gemma4Assistant(parts, sizes.max_model_len, sizes.max_num_tokens, model)
        load_weights(assistant, Path(self._folder), "auto", config.seed, place.loaded)  # also beside a dummy model
        add_frequent_head(assistant, assistant, place, self._folder, "auto")
        return assistant

    def run_largest(self, own: KVViews, of_model: KVViews) -> None:  # noqa: ARG002 (it has no layers of its own)
        super().run_largest(of_model, of_model)

    def begin(self, own: KVViews, of_model: KVViews) -> None:  # noqa: ARG002 (as above)
        super().begin(of_model, of_model)

    def attach(self, rows: Rows, rules: Rules) -> None:
        super().attach(rows, rules)
        self.chain.stays = True

    def _forward_over(self, own: KVViews) -> EagerForward:
        caches = [own[layer] for layer in self._shared]
        return EagerForward(self._model, caches, self._backend, self._place.device.torch, self._place.progress)

    def write_kv(self, step: ComputedStep) -> None:
        """Write nothing."""

    def stand_in(self, hidden: torch.Tensor) -> torch.Tensor:
        """See HeadDrafter; the assistant's outputs have the size of its own vectors."""
        out = torch.empty_like(self._model.given[: len(hidden)])
        self._model.post_projection.forward(hidden, out=out)
        return out
