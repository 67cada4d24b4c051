"""MTPDrafter: drafts with the MTP head of the checkpoint."""

from pathlib import Path

from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.mtp_head import head_names, head_spec
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import ConfigError
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.mtp_head import MTPHead
from vllm_lite.models.registry import Model, Sizes, make_parts
from vllm_lite.models.weights import load_weights
from vllm_lite.worker.drafting.frequent import add_frequent_head
from vllm_lite.worker.drafting.head import HeadDrafter
from vllm_lite.worker.drafting.place import DraftPlace


class MTPDrafter(HeadDrafter):
    """Drafts with the first of the checkpoint's heads."""

    _model: MTPHead

    def __init__(self, config: ResolvedConfig) -> None:
        whole = load_spec(config.model, config.model_impl, config.pooling)
        self._names, spec = head_names(whole), head_spec(whole)
        super().__init__(spec, spec.layers)

    def make(self, place: DraftPlace) -> Model:
        config, limits, model = place.config, place.limits, place.model
        if not isinstance(model, Decoder):
            raise ConfigError(f"method mtp is for decoders of this package, not for {type(model).__name__}")
        sizes = Sizes(limits.max_model_len, limits.max_num_tokens, exact_activations=config.exact_activations)
        device = place.device.torch
        parts = make_parts(self.spec, place.dtype, device, sizes, config.quantization, model.communicator)
        head = MTPHead(parts, sizes.max_model_len, sizes.max_num_tokens, model, self._names)
        load_weights(head, Path(config.model), config.load_format, config.seed, place.loaded)
        add_frequent_head(head, model, place, config.model, config.load_format)
        return head
