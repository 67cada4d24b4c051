"""Common parts of all decoder-only models: token embedding, layers, final norm, logits.

Read `Decoder.forward`, then the layers in layers/decoder_layer.py. Activations are in `Buffers`: `residual` is the
residual stream; `hidden` is the input and output of a block.

A family is a subclass that names its layers (`layer`) and its tensors (`names`), and overrides methods that differ.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.checkpoint.tensors.tensor_names import is_ignored
from vllm_lite.kernels.recurrent import Segments
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.attention.attention_block import Attention
from vllm_lite.layers.buffers import Buffers, StepRows
from vllm_lite.layers.decoder_layer import DecoderLayer
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.pooler import Pooler
from vllm_lite.layers.vision.tower import make_tower
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.layers.weights.weight_slot import WeightGroup

T = TypeVar("T")


class Layer(Protocol):
    """A decoder layer, see layers/decoder_layer.py."""

    @property
    def attention(self) -> Attention | None: ...

    def __init__(self, parts: Parts, layer: int) -> None: ...

    def write(self, rows: StepRows, kv: Any, batch: StepBatch, backend: AttentionBackend) -> None: ...

    def attend(self, rows: StepRows, kv: Any, batch: StepBatch, backend: AttentionBackend) -> None: ...

    def combine(self, rows: StepRows) -> None: ...

    def weight_groups(self, prefix: str) -> Iterator[WeightGroup]: ...


class DecoderNames(NamedTuple):
    """A checkpoint's names for the parts of a model."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    norm: str = "model.norm"
    head: str = "lm_head"


class Decoder:
    """One rank's part of a model: its stage's layers, and its tensor-parallel share of each. `weights.load_weights`
    loads the weights.

    With pipeline parallelism, the first stage embeds (`has_embedding`), the last one norms and computes logits
    (`has_head`), and each stage sends the activations after its last layer to the next.
    """

    names: ClassVar = DecoderNames()
    layer: ClassVar[type[Layer]] = DecoderLayer

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:
        self.spec = spec = parts.spec
        self.communicator = parts.communicator
        self.ops = ops_for(parts.device)
        self.stage = stage = parts.shard.stage
        self.has_embedding, self.has_head = stage.is_first, stage.is_last
        self.held = stage.layers(spec.num_layers)
        """Indices of this stage's layers."""
        columns = [Split.vocabulary(spec.vocab_size, shard) for shard in parts.shard.all_ranks]
        own = columns[parts.shard.rank]
        self.own_columns = slice(own.start, own.end)
        self._widths = tuple(part.size for part in columns)
        self.embedding = parts.embedding(own)
        self.adapted_tokens = parts.adapted_tokens(self.names.embedding) if self.has_embedding else None
        self.embedding_scale = spec.embedding_scale
        self.layers = [self.make_layer(parts, index) for index in self.held]
        attending = [index for index, own in enumerate(spec.layers) if own.attends]
        writers = [index for index in attending if spec.layers[index].kv_layer is None]
        self.last_writer = max(writers, default=0)
        """Index of the last layer that writes to the cache. After it, only the wanted tokens are needed."""
        self.last_reader = max(attending, default=0)
        """Index of the last layer that attends. Later work treats rows independently, without the batch."""
        self.attends = self.last_reader >= self.held.start
        """Whether this or a later stage attends; else earlier stages have sent only the wanted rows."""
        self.norm = parts.norm()
        self.lm_head = parts.lm_head(self.embedding, tied=spec.tie_word_embeddings)
        self.adapted_head = parts.adapted_head(self.names.head, self.embedding) if self.has_head else None
        self.pooler = None if spec.pooling is None else Pooler(parts)
        self.tower = make_tower(parts)
        self.buffers = Buffers(parts, max_model_len, max_num_tokens)

    def make_layer(self, parts: Parts, index: int) -> Layer:
        """Make layer `index`. Families with several classes of layers choose one here."""
        return self.layer(parts, index)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,  # prepared by `backend`
        kv_caches: list[Any],  # per layer, by `CacheEngine.layer_views`
        backend: AttentionBackend,
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the wanted tokens' hidden states after the final norm: [num_wanted, hidden_size], overwritten by the
        next call. All tokens are needed until the last layer has written to the cache. The pass continues with only the
        wanted ones after that if `batch.tail` is set, else after the last attention. Calls `progress` after each layer.
        Without `has_head` the result is meaningless; the activations were sent to the next stage.
        """
        wanted, tail, on_axes = batch.wanted, batch.tail, batch.vectors is not None
        self.buffers.begin_step()
        if self.has_embedding:
            rows = self.buffers.rows(batch.num_tokens)
            self.embed(batch, rows)
        else:
            rows = self.receive(batch)
            if not len(rows.hidden):
                return rows.hidden
        if self.attends:
            self.buffers.select_rotations(rows, batch.positions, on_axes=on_axes)
            if batch.late is not None:
                batch.late(lambda _, positions: self.buffers.select_rotations(rows, positions, on_axes=True))
        for index, layer, kv in zip(self.held, self.layers, self.held_of(kv_caches), strict=True):
            layer.write(rows, kv, batch, backend)
            if index == self.last_writer and wanted is not None and len(wanted) == 0:
                return rows.hidden[:0]
            if index == self.last_writer and wanted is not None and tail is not None:
                rows, batch, wanted = self.narrow(layer, rows, wanted, index, heads=True), tail, None
                backend.prepare(batch)
                self.buffers.select_rotations(rows, batch.positions, on_axes=on_axes)
            layer.attend(rows, kv, batch, backend)
            if index == self.last_reader and wanted is not None:
                rows = self.narrow(layer, rows, wanted, index)
            layer.combine(rows)
            progress()
        if self.has_head:
            self.last_norm(rows)
        else:
            self.send(rows)
        return rows.hidden

    def send(self, rows: StepRows) -> None:
        """Send the activations after this stage's last layer to the next stage."""
        self.communicator.send(rows.residual, self.stage.index + 1)
        self.communicator.send(rows.hidden, self.stage.index + 1)

    def receive(self, batch: StepBatch) -> StepRows:
        """Receive the previous stage's activations: of all rows while this or a later stage attends, else of the wanted
        ones, which may be none."""
        wanted = batch.wanted
        rows = self.buffers.rows(batch.num_tokens if self.attends or wanted is None else len(wanted))
        if len(rows.hidden):
            self.communicator.receive(rows.residual, self.stage.index - 1)
            self.communicator.receive(rows.hidden, self.stage.index - 1)
        return rows

    def held_of(self, of_layers: Sequence[T]) -> Sequence[T]:
        """Select the entries of this stage's layers."""
        return of_layers[self.held.start : self.held.stop]

    def narrow(
        self, layer: Layer, rows: StepRows, wanted: torch.Tensor, index: int, *, heads: bool = False
    ) -> StepRows:
        """Gather the `wanted` rows, int64 [k], with which the pass continues in layer `index`; see Buffers.gather.
        `heads`: before that layer's attention."""
        if layer.attention is None:
            return rows
        return self.buffers.gather(rows, wanted, layer.attention.kind, index, heads=heads)

    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[Any]) -> None:
        """See hybrid.Hybrid.take_up. Nothing to do: no layer keeps a state."""

    def last_norm(self, rows: StepRows) -> None:
        """Add rows.hidden to rows.residual, and write the norm of the sum to rows.hidden."""
        self.norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """Fill rows.residual with the first layer's input: scaled token embeddings, and the batch's own vectors."""
        self.embedding.forward(batch.token_ids, out=rows.residual)
        if self.adapted_tokens is not None:
            self.adapted_tokens.add(batch.token_ids, rows.residual)
        if self.embedding_scale != 1.0:
            self.ops.scale(rows.residual, self.embedding_scale)
        residual = rows.residual
        batch.with_vectors(lambda own, _: residual.index_copy_(0, own.rows, own.vectors.to(residual.dtype)))

    def empty_logits(self, num_rows: int) -> torch.Tensor:
        """Memory for `logits`: float32 [num_rows, vocab_size], shared between ranks if possible; then the next call may
        return the same memory. Without a head it has no columns; columns that the head does not score hold -inf."""
        rows = self.communicator.shared_rows(num_rows, self.spec.vocab_size if self.has_head else 0, torch.float32)
        return rows if self.lm_head.is_whole else rows.fill_(-torch.inf)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None, which: Which | None = None) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], the rows `which` of `forward`'s result (None: all) -> `out`, made by
        `empty_logits`, or a new one.

        This rank fills only the columns `own_columns`; `gather_logits` completes the others.
        """
        if out is None:
            out = self.empty_logits(hidden.shape[0])
        if not self.has_head:
            return out
        self.lm_head.forward(hidden, out)
        if self.adapted_head is not None:
            self.adapted_head.add(hidden, out, which)
        if self.spec.logits_scale != 1.0 or self.spec.logits_soft_cap:
            for columns in self.lm_head.columns:
                self.ops.scale_and_cap(out[:, columns], self.spec.logits_scale, self.spec.logits_soft_cap)
        return out

    @torch.inference_mode()
    def gather_logits(self, out: torch.Tensor) -> None:
        """Wait until all ranks have filled their columns of `out`, which every rank then sees. All ranks call this."""
        if self.has_head:
            self.communicator.gather_columns(out, self._widths)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """All tensors that a checkpoint must have, in groups that are loaded one after another."""
        if self.has_embedding:
            yield from self.embedding_groups()
        for index, layer in zip(self.held, self.layers, strict=True):
            yield from layer.weight_groups(self.names.layer.format(index))
        if self.has_head:
            yield from self.head_groups()
        if self.tower is not None:
            yield from self.tower.weight_groups()

    def embedding_groups(self) -> Iterator[WeightGroup]:
        """Tensors of `embed`, in the first stage. A tied head in the same stage loads the tensor that it shares."""
        if not (self.lm_head.tied and self.has_head):
            yield self.embedding.group(self.names.embedding)

    @property
    def head_name(self) -> str:
        """The checkpoint's name for the matrix of the LM head."""
        return self.names.embedding if self.lm_head.tied else self.names.head

    def head_groups(self) -> Iterator[WeightGroup]:
        """Tensors of the parts after the layers, in the last stage."""
        yield self.norm.group(self.names.norm)
        yield self.lm_head.group(self.head_name)
        if self.pooler is not None:
            yield from self.pooler.weight_groups()

    def take_kv_scales(self, scales: Sequence[KVScales]) -> None:
        """Set the scales of each layer's float8 cache."""
        for layer, own in zip(self.layers, self.held_of(scales), strict=True):
            if layer.attention is not None:
                layer.attention.kv_scales = own

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor of this name that the model does not need."""
        spec = self.spec
        unread, without_kv = spec.unread_layers, spec.layers_without_kv
        if self.stage.count > 1 and name.startswith(self._elsewhere):
            return True
        return is_ignored(name, tied=self.lm_head.tied, unread_layers=unread, without_kv=without_kv)

    @cached_property
    def _elsewhere(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that only other stages hold."""
        others = (index for index in range(self.spec.num_layers) if index not in self.held)
        layers = [self.names.layer.format(index) for index in others]
        asked = {slot.name for group in self.weight_groups() for slot in group.slots}
        ends = [*self.embedding_groups(), *self.head_groups()]
        return (*layers, *({slot.name for group in ends for slot in group.slots} - asked))
