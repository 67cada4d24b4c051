"""The Llama family of decoder-only models: Llama, Mistral and Qwen3, which differ only by what ModelSpec says.

Read `Llama.forward`, then `DecoderLayer`. Activations live in `Buffers`: `residual` is the stream that every block adds
to; `hidden` is what a block reads (normed) and then what it gives back, which the next norm adds.

A family whose layers are put together in another way replaces `DecoderLayer`, by a class of its own as `Llama.layer`.
"""

from collections.abc import Callable, Iterator

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.layers.attention_block import AttentionBlock
from vllm_lite.layers.buffers import Buffers, Rows
from vllm_lite.layers.embedding import Embedding, LMHead
from vllm_lite.layers.mlp import GatedMLP
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weight_slot import WeightGroup


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, parts: Parts, layer: int) -> None:
        self.first = layer == 0
        self.input_norm = parts.norm()
        self.attention = AttentionBlock(parts, layer)
        self.mlp_norm = parts.norm()
        self.mlp = GatedMLP(parts)

    def attend(self, rows: Rows, kv: torch.Tensor, batch: StepBatch, backend: AttentionBackend) -> None:
        """What is done for every token. rows.hidden is what the layer before gave back, to be added to rows.residual;
        before the first layer there is nothing."""
        if self.first:
            self.input_norm.forward(rows.residual, out=rows.hidden)
        else:
            self.input_norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        self.attention.attend(rows, kv, batch, backend)

    def combine(self, rows: Rows) -> None:
        """What is done for the tokens that go on. rows.hidden becomes the MLP's output, still to be added."""
        self.attention.project(rows)
        self.mlp_norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        self.mlp.forward(rows)

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]:
        """What a checkpoint has of this layer under `prefix`, like "model.layers.0."."""
        yield self.input_norm.group(f"{prefix}input_layernorm")
        yield from self.attention.weight_groups(f"{prefix}self_attn.")
        yield self.mlp_norm.group(f"{prefix}post_attention_layernorm")
        yield from self.mlp.weight_groups(f"{prefix}mlp.")


class Llama:
    """One rank's part of the model. It has no weights until `weights.load_weights` has given it some."""

    layer: type[DecoderLayer] = DecoderLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        self.spec = spec = parts.spec
        self.communicator = parts.communicator
        held = [Split.vocabulary(spec.vocab_size, shard) for shard in parts.shard.all_ranks]
        own = held[parts.shard.rank]
        self.own_columns = slice(own.start, own.end)
        self._widths = tuple(part.size for part in held)
        self.embedding = Embedding(own, spec.hidden_size, parts.communicator, dtype=parts.dtype, device=parts.device)
        self.layers = [self.layer(parts, index) for index in range(spec.num_layers)]
        self.norm = parts.norm()
        self.lm_head = LMHead(self.embedding, tied=spec.tie_word_embeddings, quantization=parts.head_quantization)
        self.buffers = Buffers(parts, max_model_len, max_num_tokens)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,  # prepared by `backend`
        kv_caches: list[torch.Tensor],  # per layer: [num_blocks, 2, num_kv_heads, block_size, head_size]
        backend: AttentionBackend,
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """The wanted tokens' hidden states after the final norm: [num_wanted, hidden_size], overwritten by the next
        call. The last layer's attention is needed of all tokens, for the cache; what follows it of the wanted only.
        `progress` is called once a layer.
        """
        rows, wanted, last = self.buffers.rows(batch.num_tokens), batch.wanted, self.layers[-1]
        self.embedding.forward(batch.token_ids, out=rows.residual)
        self.buffers.select_rotations(rows, batch.positions)
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            layer.attend(rows, kv, batch, backend)
            if wanted is not None and layer is last:
                if len(wanted) == 0:
                    return rows.hidden[:0]
                rows = self.buffers.gather(rows, wanted, layer.attention.kind)
            layer.combine(rows)
            progress()
        self.norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        return rows.hidden

    def empty_logits(self, num_rows: int) -> torch.Tensor:
        """Memory for `logits`: float32 [num_rows, vocab_size], shared by ranks that can; then the next call may return
        the same again."""
        return self.communicator.shared_rows(num_rows, self.spec.vocab_size, torch.float32)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], rows of `forward`'s result -> `out`, by `empty_logits`, or a new one.

        Of its columns this rank fills `own_columns` and no others; `gather_logits` completes it.
        """
        if out is None:
            out = self.empty_logits(hidden.shape[0])
        self.lm_head.forward(hidden, out)
        return out

    @torch.inference_mode()
    def gather_logits(self, out: torch.Tensor) -> None:
        """Wait until all ranks have filled their columns of `out`, which then every rank sees. All ranks call it."""
        self.communicator.gather_columns(out, self._widths)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Every tensor that a checkpoint must have, in groups that are loaded one after another."""
        embedding = "model.embed_tokens"
        if not self.lm_head.tied:
            yield self.embedding.group(embedding)
        for index, layer in enumerate(self.layers):
            yield from layer.weight_groups(f"model.layers.{index}.")
        yield self.norm.group("model.norm")
        yield self.lm_head.group(embedding if self.lm_head.tied else "lm_head")

    def ignores(self, name: str) -> bool:
        """Tensors that some checkpoints have and nobody needs: the copy of a tied head, old RoPE tables."""
        return name.endswith(".rotary_emb.inv_freq") or (self.lm_head.tied and name == "lm_head.weight")
