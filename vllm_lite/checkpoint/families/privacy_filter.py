"""OpenAI's privacy filter: gpt-oss layers with two-sided windows, and a label for each token."""

from vllm_lite.checkpoint.families.common import EncoderParts, Family, encoder
from vllm_lite.checkpoint.families.gpt_oss import GptOssConfig, oss_layers
from vllm_lite.checkpoint.layer_specs.pooling import HeadSpec
from vllm_lite.checkpoint.model_spec import EncoderSpec, ModelSpec, NormSpec
from vllm_lite.checkpoint.typed_json import Size

KINDS = (
    *("account_number", "private_address", "private_date", "private_email"),
    *("private_person", "private_phone", "private_url", "secret"),
)
LABELS = ("O", *(f"{tag}-{kind}" for kind in KINDS for tag in "BIES"))
"""Default labels."""


class PrivacyFilterConfig(GptOssConfig, kw_only=True):
    sliding_window: Size = 128
    token_classification_bias: bool = True


def _privacy_filter(architecture: str, raw: PrivacyFilterConfig) -> ModelSpec:
    """Read a privacy filter, whose layers attend to `sliding_window` tokens on each side and the token itself."""
    layers = oss_layers(raw, lambda own: [(own.sliding_window or 0) + 1] * own.num_hidden_layers, interleaved=True)
    head = HeadSpec(output="score", output_bias=raw.token_classification_bias)
    return encoder(
        architecture,
        raw,
        layers,
        NormSpec(raw.rms_norm_eps, "wide rms"),
        EncoderParts(EncoderSpec(), raw.intermediate_size, head, token_head=head, token_labels=LABELS),
        activation="swiglu_oai",
        qkv_bias=raw.attention_bias,
        output_bias=raw.attention_bias,
    )


FAMILIES = {
    "OpenAIPrivacyFilterForTokenClassification": Family(
        PrivacyFilterConfig, _privacy_filter, {"num_experts": "num_local_experts"}
    )
}
