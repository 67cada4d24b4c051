"""Choice of a model's attention backend: the device's first that supports its shape, or the one requested."""

from pkgutil import resolve_name

from vllm_lite.attention.backend import AttentionBackend, AttentionShape
from vllm_lite.attention.whole_images import WholeImages
from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log

BACKENDS = {
    "cpu": "vllm_lite.attention.cpu:CpuBackend",
    "cuda": "vllm_lite.attention.cuda:CudaBackend",
    "encoder": "vllm_lite.attention.encoder:EncoderBackend",
    "paged": "vllm_lite.attention.paged:PagedBackend",
    "reference": "vllm_lite.attention.reference:ReferenceBackend",
}
PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "reference")}
"""Best first; the reference, which supports everything, is always last."""


logger = log.get(__name__)


def select_backend(shape: AttentionShape, override: str = "auto") -> AttentionBackend:
    """Make the attention backend for `shape`. `override` names one of BACKENDS; "auto" takes the device's best that
    serves all KV groups, and warns of better ones that do not.

    Raises ConfigError when the name is unknown or none of the candidates supports the shape; the reasons are listed.
    """
    if shape.is_encoder:
        override = "encoder"  # the only one for encoders; it chooses kernels by the device
    if override != "auto" and override not in BACKENDS:
        raise ConfigError(f"attention backend {override!r} is unknown; use auto, {', '.join(BACKENDS)}")
    names = PREFERENCE.get(shape.device.type, ("reference",)) if override == "auto" else (override,)
    reasons: list[str] = []
    for name in names:
        backend: type[AttentionBackend] = resolve_name(BACKENDS[name])
        reason = backend.supports(shape)
        if reason is None:
            if reasons:
                logger.warning("attention is computed by the slower backend %s: %s", name, "; ".join(reasons))
            made = backend(shape)
            wraps = not made.sees_images and any(spec.whole_images for spec in shape.groups)
            return WholeImages(made) if wraps else made
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"no attention backend for this model on {shape.device}: {'; '.join(reasons)}")
