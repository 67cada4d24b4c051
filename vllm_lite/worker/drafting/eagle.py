"""EagleDrafter: drafts with an EAGLE-3 head, a separate checkpoint that was trained on the model's hidden states.

It differs from an MTP head only in its input: the joined residual streams after three layers of the model instead of
the last hidden state. docs/speculation.md has its limits.
"""

from dataclasses import replace
from pathlib import Path

from vllm_lite.checkpoint.draft_model import kept_layers
from vllm_lite.checkpoint.eagle_head import check_eagle, layer_name, read_eagle
from vllm_lite.errors import ConfigError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.eagle_head import EagleHead
from vllm_lite.models.registry import Model, Sizes, make_parts
from vllm_lite.models.weights import load_weights
from vllm_lite.runtime.nested_settings import Speculation
from vllm_lite.worker.drafting.head import HeadDrafter
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.sampling.drafter import ComputedStep


class EagleDrafter(HeadDrafter):
    """Drafts with the head, one pass for each draft."""

    _model: EagleHead

    def __init__(self, speculation: Speculation) -> None:
        if speculation.model is None:
            raise ConfigError("method eagle3 needs model, the folder or hub id of a head")
        self._folder, self._quantization = speculation.model, speculation.quantization
        self._eagle = read_eagle(self._folder)
        super().__init__(self._eagle.spec, kept_layers(self._eagle.spec))

    def make(self, place: DraftPlace) -> Model:
        config, limits, model = place.config, place.limits, place.model
        check_eagle(self._eagle, model.spec)
        if not isinstance(model, Decoder):
            raise ConfigError(f"method eagle3 is for decoders of this package, not for {type(model).__name__}")
        sizes = Sizes(limits.max_model_len, limits.max_num_tokens, exact_activations=config.exact_activations)
        parts = make_parts(self.spec, place.dtype, place.device.torch, sizes, self._quantization, model.communicator)
        lengths = sizes.max_model_len, sizes.max_num_tokens
        head = EagleHead(parts, lengths, model, self._eagle, layer_name(self._folder))
        load_weights(head, Path(self._folder), "auto", config.seed, place.loaded)  # also beside a dummy model
        head.keep(max(place.graph_sizes, default=0))
        return head

    def computed(self, step: ComputedStep) -> None:
        hidden = None if step.hidden is None else self._model.fused(len(step.hidden))
        super().computed(replace(step, hidden=hidden))
