"""Memory of LoRA adapters that adapt every linear layer, by the model's numbers alone. No torch."""

from msgspec.structs import replace

from vllm_lite.checkpoint.model_spec import LayerSpec, ModelSpec
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.config import EngineConfig


def adapter_bytes(spec: ModelSpec, config: EngineConfig, dtype_bytes: int, device: str) -> int:
    """Bytes of all adapters on the first rank, which has most: as many as are kept, of the largest rank. On a GPU there
    are slots besides, into which those of a step are copied. Raises ConfigError if the ranks cannot share the model."""
    if not config.enable_lora:
        return 0
    num_kept = (config.max_cpu_loras or config.max_loras) + (config.max_loras if device == "cuda" else 0)
    return num_kept * config.max_lora_rank * dtype_bytes * adapted_elements(spec, config.tensor_parallel_size)


def adapted_elements(spec: ModelSpec, world: int = 1) -> int:
    """The inputs and outputs of all linear layers that can be adapted, added up: the elements of an adapter of rank 1,
    or a few more, as projections that are one matrix in the checkpoint have one A."""
    shard = Shard(0, world)
    own = replace(spec, intermediate_size=-(-spec.intermediate_size // world))
    attention = sum(_attention(layer.per_rank(shard), own) for layer in spec.layers if layer.attends)
    return attention + sum(_mlp(layer, own, world) for layer in spec.layers if layer.has_mlp)


def _attention(layer: LayerSpec, spec: ModelSpec) -> int:
    heads, hidden, latent, recurrent = layer.attention, spec.hidden_size, layer.latent, layer.recurrent
    if recurrent is not None:
        others = _attention(layer.blocks[0], spec) if recurrent.beside_attention else 0
        return others + (recurrent.num_projections + 1) * hidden + recurrent.projected_size + recurrent.value_width
    if latent is not None:
        query = heads.num_heads * latent.query_size
        queries = hidden + (2 * latent.query_rank if latent.query_rank else 0) + query
        return queries + hidden + latent.cached_size + heads.num_heads * latent.value_size + hidden
    num_kv = 0 if layer.kv_layer is not None else 1 if layer.values_are_keys else 2
    projected = heads.query_size + layer.gate_size + num_kv * heads.num_kv_heads * heads.head_size
    return (1 + num_kv + (layer.output_gate in ("elements", "heads"))) * hidden + projected + heads.output_size + hidden


def _mlp(layer: LayerSpec, spec: ModelSpec, world: int) -> int:
    """An MLP and a shared expert; single experts cannot be adapted."""
    num_up, sizes = 2 if spec.gated_mlp else 1, []
    if layer.experts is None or spec.mlp_beside_experts:
        sizes.append(-(-layer.intermediate_size // world) if layer.intermediate_size else spec.intermediate_size)
    if layer.experts is not None and layer.experts.shared_intermediate_size:
        sizes.append(-(-layer.experts.shared_intermediate_size // world))
    return sum((num_up + 1) * (spec.hidden_size + size) for size in sizes)
