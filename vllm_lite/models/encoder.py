"""Common parts of all encoders: token embedding and additions to it, layers that see each text as a whole.

There is no KV cache and there are no logits; the pooler takes the hidden states. A family is a subclass that names its
layers and its tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.model_spec import EncoderSpec
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.errors import ConfigError, ProtocolError
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.learned_positions import LearnedPositions
from vllm_lite.layers.buffers import Buffers, StepRows
from vllm_lite.layers.encoder_layer import EncoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.pooler import Pooler
from vllm_lite.layers.vision.tower import VisionTower
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot
from vllm_lite.models.decoder import Layer

UNREAD = (
    *("cls.", "lm_head.", "pooler.", "head.", "decoder.", "classifier.", "model.weight", "model.bias"),
    *("pre_classifier.", "vocab_layer_norm.", "vocab_projector.", "vocab_transform."),
)
"""Canonical names of heads for other tasks than the served one."""
TABLES = (".position_ids", ".token_type_ids", ".inv_freq")


class EncoderNames(NamedTuple):
    """A checkpoint's names for the parts of a model; empty for parts that the model lacks."""

    embedding: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}."
    norm: str = ""


class TokenTypes:
    """A learned vector for each type of token: 0, or 1 in the second text of a pair."""

    table: torch.Tensor  # [num_types, hidden_size], by `load`

    def __init__(self, parts: Parts, num_types: int, max_num_tokens: int) -> None:
        self.shape = num_types, parts.spec.hidden_size
        self.zeros = torch.zeros(max_num_tokens, dtype=torch.int64, device=parts.device)
        self.dtype, self.device = parts.dtype, parts.device
        self.ops = ops_for(parts.device)

    def load(self, weight: torch.Tensor) -> None:
        self.table = weight

    def group(self, name: str) -> WeightGroup:
        """Request the checkpoint tensor `<name>.weight`."""
        return WeightGroup(
            (WeightStack((whole_slot(f"{name}.weight", *self.shape),), self.dtype, self.device),), self.load
        )

    def add_to(self, x: torch.Tensor, types: torch.Tensor | None) -> None:
        """Add the types' vectors to x: [num_tokens, hidden_size]; types: int64 [num_tokens], None = all 0."""
        if types is None or len(self.table) == 1:
            types = self.zeros[: len(x)]
        self.ops.add_rows(x, self.table, types)


class Encoder:
    """One rank's part of a model. `weights.load_weights` loads the weights."""

    names: ClassVar = EncoderNames()
    layer: ClassVar[type[Layer]] = EncoderLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        self.spec = spec = parts.spec
        self.communicator = parts.communicator
        own: EncoderSpec = spec.encoder or EncoderSpec()
        held = Split.vocabulary(spec.vocab_size, parts.shard)
        self.own_columns = slice(0, 0)
        self.embedding = parts.embedding(held)
        self.adapted_tokens = parts.adapted_tokens(self.names.embedding)
        self.positions = None
        if own.num_positions:
            if max_model_len > own.num_positions - own.position_offset:
                raise ConfigError(
                    f"max_model_len must be at most the {own.num_positions - own.position_offset} positions that the "
                    f"model has learned, got {max_model_len}"
                )
            self.positions = LearnedPositions(parts, own.position_offset, own.num_positions)
        self.types = TokenTypes(parts, own.num_types, max_num_tokens) if own.num_types else None
        self.embedding_norm = parts.norm() if self.names.embedding_norm else None
        self.layers = [self.layer(parts, index) for index in range(spec.num_layers)]
        self.norm = parts.norm() if self.names.norm else None
        self.pooler = Pooler(parts)
        self.tower: VisionTower[Any] | None = None
        self.buffers = Buffers(parts, max_model_len, max_num_tokens)
        self._no_cache = torch.empty(0)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,  # prepared by `backend`
        kv_caches: list[torch.Tensor],  # noqa: ARG002 - there are none
        backend: AttentionBackend,
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """The wanted tokens' hidden states: [num_wanted, hidden_size], overwritten by the next call."""
        self.buffers.begin_step()
        rows, wanted, last = self.buffers.rows(batch.num_tokens), batch.wanted, self.layers[-1]
        self.embed(batch, rows)
        self.buffers.select_rotations(rows, batch.positions)
        for layer in self.layers:
            layer.write(rows, self._no_cache, batch, backend)
            layer.attend(rows, self._no_cache, batch, backend)
            if wanted is not None and layer is last and layer.attention is not None:
                rows = self.buffers.gather(rows, wanted, layer.attention.kind, len(self.layers) - 1)
            layer.combine(rows)
            progress()
        if self.norm is None:
            return rows.residual
        self.norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)
        return rows.hidden

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """Fill rows.residual with the first layer's input."""
        x = rows.residual
        self.embedding.forward(batch.token_ids, out=x)
        if self.adapted_tokens is not None:
            self.adapted_tokens.add(batch.token_ids, x)
        if self.types is not None:
            self.types.add_to(x, batch.token_types)
        if self.positions is not None:
            self.positions.add_to(x, batch.positions)
        if self.embedding_norm is not None:
            self.embedding_norm.forward(x, out=x)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """All tensors that a checkpoint must have, in groups that are loaded one after another."""
        names = self.names
        yield self.embedding.group(names.embedding)
        if self.positions is not None:
            yield self.positions.group(names.positions)
        if self.types is not None:
            yield self.types.group(names.types)
        if self.embedding_norm is not None:
            yield self.embedding_norm.group(names.embedding_norm)
        for index, layer in enumerate(self.layers):
            yield from layer.weight_groups(names.layer.format(index))
        if self.norm is not None:
            yield self.norm.group(names.norm)
        yield from self.pooler.weight_groups()

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor of this name that the model does not need."""
        return name.startswith(UNREAD) or name.endswith(TABLES)

    # ---- methods that only decoders need

    def empty_logits(self, num_rows: int) -> torch.Tensor:
        raise ProtocolError(f"{num_rows} logits are wanted of an encoder, which has none")

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None, which: Which | None = None) -> torch.Tensor:
        del out, which
        return self.empty_logits(len(hidden))

    def gather_logits(self, out: torch.Tensor) -> None:
        self.empty_logits(len(out))

    def take_kv_scales(self, scales: Sequence[KVScales]) -> None:
        """Do nothing: there is no cache."""
