"""The Llama family of decoder-only models: Llama, Mistral and Qwen3, which differ only by what ModelSpec says.

Read `Llama.forward`, then `DecoderLayer`. Activations live in `Buffers`: `residual` is the stream that every
block adds to; `hidden` is what a block reads (normed) and then what it gives back, which the next norm adds.
"""

from collections.abc import Iterator

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import AttentionMetadata
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.layers.activation import SiluAndMul
from vllm_lite.layers.attention import Attention
from vllm_lite.layers.buffers import Buffers, Rows
from vllm_lite.layers.embedding import Embedding, LMHead
from vllm_lite.layers.linear import Linear
from vllm_lite.layers.norm import RMSNorm
from vllm_lite.layers.rope import RotaryEmbedding
from vllm_lite.layers.weight_form import Quantization
from vllm_lite.layers.weight_slot import SINGLE, Shard, Split, WeightGroup


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, group: int, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        hidden = Split.whole(spec.hidden_size)
        heads = Split.even(spec.num_heads * spec.head_dim, shard)
        kv_heads = Split.kv_heads(spec.num_kv_heads, spec.head_dim, shard)
        inner = Split.even(spec.intermediate_size, shard)

        def linear(inputs: Split, *outputs: Split, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, spec.norm_eps, dtype=dtype, device=device)

        self.input_norm = norm(spec.hidden_size)
        self.qkv = linear(hidden, heads, kv_heads, kv_heads, bias=spec.attention_bias)
        self.query_norm = norm(spec.head_dim) if spec.qk_norm else None
        self.key_norm = norm(spec.head_dim) if spec.qk_norm else None
        self.attention = Attention(group)
        self.output = linear(heads, hidden, bias=spec.attention_bias)
        self.mlp_norm = norm(spec.hidden_size)
        self.gate_up = linear(hidden, inner, inner, bias=spec.mlp_bias)
        self.activation = SiluAndMul(device)
        self.down = linear(inner, hidden, bias=spec.mlp_bias)

    def attend(self, rows: Rows, kv: torch.Tensor, metadata: AttentionMetadata, backend: AttentionBackend) -> None:
        """rows.hidden, behind `input_norm`, -> rows.attended, and K and V to the cache."""
        self.qkv.forward(rows.hidden, out=rows.qkv)
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.forward(rows.query, out=rows.query)
            self.key_norm.forward(rows.key, out=rows.key)
        self.attention.forward(rows, kv, metadata, backend)

    def combine(self, rows: Rows) -> None:
        """rows.attended -> rows.hidden: this layer's MLP output, which is still to be added to rows.residual."""
        self.output.forward(rows.attended, out=rows.hidden)

        self.mlp_norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        self.gate_up.forward(rows.hidden, out=rows.gate_up)
        self.activation.forward(rows.gate_up, out=rows.activated)
        self.down.forward(rows.activated, out=rows.hidden)

    def weight_groups(self, prefix: str, quantization: Quantization | None) -> Iterator[WeightGroup]:
        """What a checkpoint has of this layer under `prefix`, like "model.layers.0."."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        yield self.input_norm.group(f"{prefix}input_layernorm")
        qkv = (f"{attention}{part}_proj" for part in "qkv")
        yield self.qkv.group(*qkv, quantization=quantization)
        if self.query_norm is not None and self.key_norm is not None:
            yield self.query_norm.group(f"{attention}q_norm")
            yield self.key_norm.group(f"{attention}k_norm")
        yield self.output.group(f"{attention}o_proj", quantization=quantization)
        yield self.mlp_norm.group(f"{prefix}post_attention_layernorm")
        yield self.gate_up.group(f"{mlp}gate_proj", f"{mlp}up_proj", quantization=quantization)
        yield self.down.group(f"{mlp}down_proj", quantization=quantization)


class Llama:
    """One rank's part of the model. It has no weights until `weights.load_weights` has given it some."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        max_num_tokens: int,
        shard: Shard = SINGLE,
    ) -> None:
        self.spec = spec
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.rope = RotaryEmbedding(spec.rope, spec.head_dim, max_model_len, device=device)
        group_of = {layer: index for index, group in enumerate(spec.kv_groups) for layer in group.layers}
        self.layers = [DecoderLayer(spec, group_of[layer], shard, dtype, device) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.norms_behind = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        self.lm_head = LMHead(self.embedding, tied=spec.tie_word_embeddings)
        self.buffers = Buffers(spec, shard, max_num_tokens, dtype, device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,  # int [num_tokens]
        positions: torch.Tensor,  # int64 [num_tokens]
        kv_caches: list[torch.Tensor],  # per layer: [num_blocks, 2, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,  # prepared by `backend`
        backend: AttentionBackend,
        wanted: torch.Tensor | None = None,  # int64 [num_wanted], rows of the step; None = all
    ) -> torch.Tensor:
        """The wanted tokens' hidden states after the final norm: [num_wanted, hidden_size], overwritten by the next
        call. The last layer's attention is needed of all tokens, for the cache; what follows it of the wanted only.
        """
        rows = self.buffers.rows(input_ids.shape[0])
        self.embedding.forward(input_ids, out=rows.residual)
        self.rope.select(positions, rows.rotation)
        self.layers[0].input_norm.forward(rows.residual, out=rows.hidden)
        for layer, norm_behind, kv in zip(self.layers, self.norms_behind, kv_caches, strict=True):
            layer.attend(rows, kv, metadata, backend)
            if wanted is not None and layer is self.layers[-1]:
                if len(wanted) == 0:
                    return rows.hidden[:0]
                rows = self.buffers.gather(rows, wanted)
            layer.combine(rows)
            norm_behind.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        return rows.hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], rows of `forward`'s result -> `out` or a new tensor, float32 [num_rows,
        vocab_size]."""
        if out is None:
            out = torch.empty(hidden.shape[0], self.spec.vocab_size, dtype=torch.float32, device=hidden.device)
        self.lm_head.forward(hidden, out)
        return out

    def weight_groups(self, quantization: Quantization | None = None) -> Iterator[WeightGroup]:
        """Every tensor that a checkpoint must have, in groups that are loaded one after another.

        `quantization` is for all matrix products, the LM head's too; the embedding keeps the model's dtype.
        """
        embedding = "model.embed_tokens"
        if not self.lm_head.tied:
            yield self.embedding.group(embedding)
        for index, layer in enumerate(self.layers):
            yield from layer.weight_groups(f"model.layers.{index}.", quantization)
        yield self.norm.group("model.norm")
        yield self.lm_head.group(embedding if self.lm_head.tied else "lm_head", quantization)

    def ignores(self, name: str) -> bool:
        """Tensors that some checkpoints have and nobody needs: the copy of a tied head, old RoPE tables."""
        return name.endswith(".rotary_emb.inv_freq") or (self.lm_head.tied and name == "lm_head.weight")
