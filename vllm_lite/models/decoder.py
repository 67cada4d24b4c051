"""Common parts of all decoder-only models: token vectors, layers, a last norm, logits.

Read `Decoder.forward`, then the orders in layers/decoder_layer.py. Activations live in `Buffers`: `residual` is the
stream that every block adds to; `hidden` is what a block reads and what it gives back.

A family is a subclass that names its layers (`layer`) and its tensors (`names`), and replaces a method where it
computes something else.
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
from vllm_lite.layers.vision.tower import VisionTower
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.layers.weights.weight_slot import WeightGroup

T = TypeVar("T")


class Layer(Protocol):
    """One of the orders in layers/decoder_layer.py."""

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
    """One rank's part of a model: its stage's layers, and its share of each. It has no weights until
    `weights.load_weights` has given it some.

    Where the layers are shared out, a step goes from stage to stage: the first one embeds (`has_embedding`), the last
    one norms and makes logits (`has_head`), and what is between two layers goes from one stage to the next.
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
        """Numbers of this stage's layers."""
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
        """The last layer that writes to the cache. What follows is needed of the wanted tokens only."""
        self.last_reader = max(attending, default=0)
        """The last layer that attends. What follows needs nothing of a step but its rows."""
        self.attends = self.last_reader >= self.held.start
        """Whether a layer from this stage on attends; else the stages before it have sent the wanted rows alone."""
        self.norm = parts.norm()
        self.lm_head = parts.lm_head(self.embedding, tied=spec.tie_word_embeddings)
        self.adapted_head = parts.adapted_head(self.names.head, self.embedding) if self.has_head else None
        self.pooler = None if spec.pooling is None else Pooler(parts)
        self.tower: VisionTower[Any] | None = None
        self.buffers = Buffers(parts, max_model_len, max_num_tokens)

    def make_layer(self, parts: Parts, index: int) -> Layer:
        """Make layer `index`. A family whose layers differ by the model's numbers chooses here."""
        return self.layer(parts, index)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,  # prepared by `backend`
        kv_caches: list[Any],  # per layer, by `CacheEngine.layer_views`
        backend: AttentionBackend,
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """The wanted tokens' hidden states after the final norm: [num_wanted, hidden_size], overwritten by the next
        call. All tokens are needed until the last layer has written to the cache. Behind that only the wanted ones go
        on, or behind the last attention, if they are no batch of their own. `progress` is called behind each layer.
        Without a head the result is of no use; it has gone to the next stage.
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
        """Send the next stage what the last layer of this one has left."""
        self.communicator.send(rows.residual, self.stage.index + 1)
        self.communicator.send(rows.hidden, self.stage.index + 1)

    def receive(self, batch: StepBatch) -> StepRows:
        """Take what the stage before has left of a step: all its rows while layers attend, then the wanted ones, which
        may be none."""
        wanted = batch.wanted
        rows = self.buffers.rows(batch.num_tokens if self.attends or wanted is None else len(wanted))
        if len(rows.hidden):
            self.communicator.receive(rows.residual, self.stage.index - 1)
            self.communicator.receive(rows.hidden, self.stage.index - 1)
        return rows

    def held_of(self, of_layers: Sequence[T]) -> Sequence[T]:
        """The entries of this stage's layers, of those of all."""
        return of_layers[self.held.start : self.held.stop]

    def narrow(
        self, layer: Layer, rows: StepRows, wanted: torch.Tensor, index: int, *, heads: bool = False
    ) -> StepRows:
        """The rows that go on alone from layer `index` on, moved together. wanted: int64 [k]. `heads`: they have yet to
        attend there."""
        if layer.attention is None:
            return rows
        return self.buffers.gather(rows, wanted, layer.attention.kind, index, heads=heads)

    def take_up(self, tokens: torch.Tensor, segments: Segments, kv_caches: list[Any]) -> None:
        """As hybrid.Hybrid's. Here no layer keeps a state."""

    def last_norm(self, rows: StepRows) -> None:
        """Norm what the last layer has left in rows.residual and rows.hidden into rows.hidden."""
        self.norm.add_forward(rows.residual, rows.hidden, out=rows.hidden)

    def embed(self, batch: StepBatch, rows: StepRows) -> None:
        """Fill rows.residual with what the first layer reads: vectors of tokens, scaled, and the batch's own ones."""
        self.embedding.forward(batch.token_ids, out=rows.residual)
        if self.adapted_tokens is not None:
            self.adapted_tokens.add(batch.token_ids, rows.residual)
        if self.embedding_scale != 1.0:
            self.ops.scale(rows.residual, self.embedding_scale)
        residual = rows.residual
        batch.with_vectors(lambda own, _: residual.index_copy_(0, own.rows, own.vectors.to(residual.dtype)))

    def empty_logits(self, num_rows: int) -> torch.Tensor:
        """Memory for `logits`: float32 [num_rows, vocab_size], shared by ranks that can; then the next call may return
        the same again. Without a head it has no columns; those that the head does not score say that there is no
        chance."""
        rows = self.communicator.shared_rows(num_rows, self.spec.vocab_size if self.has_head else 0, torch.float32)
        return rows if self.lm_head.is_whole else rows.fill_(-torch.inf)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None, which: Which | None = None) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], the rows `which` of `forward`'s result (None: all) -> `out`, by
        `empty_logits`, or a new one.

        Of its columns this rank fills `own_columns` and no others; `gather_logits` completes it.
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
        """Wait until all ranks have filled their columns of `out`, which then every rank sees. All ranks call it."""
        if self.has_head:
            self.communicator.gather_columns(out, self._widths)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Every tensor that a checkpoint must have, in groups that are loaded one after another."""
        if self.has_embedding:
            yield from self.embedding_groups()
        for index, layer in zip(self.held, self.layers, strict=True):
            yield from layer.weight_groups(self.names.layer.format(index))
        if self.has_head:
            yield from self.head_groups()
        if self.tower is not None:
            yield from self.tower.weight_groups()

    def embedding_groups(self) -> Iterator[WeightGroup]:
        """The tensors of `embed`, in the first stage. A tied head loads those that it shares, where it is there."""
        if not (self.lm_head.tied and self.has_head):
            yield self.embedding.group(self.names.embedding)

    def head_groups(self) -> Iterator[WeightGroup]:
        """The tensors of what follows the layers, in the last stage."""
        names = self.names
        yield self.norm.group(names.norm)
        yield self.lm_head.group(names.embedding if self.lm_head.tied else names.head)
        if self.pooler is not None:
            yield from self.pooler.weight_groups()

    def take_kv_scales(self, scales: Sequence[KVScales]) -> None:
        """Have each layer scale its float8 cache by its own."""
        for layer, own in zip(self.layers, self.held_of(scales), strict=True):
            if layer.attention is not None:
                layer.attention.kv_scales = own

    def ignores(self, name: str) -> bool:
        """Tensors that some checkpoints have and nobody needs."""
        spec = self.spec
        unread, without_kv = spec.unread_layers, spec.layers_without_kv
        if self.stage.count > 1 and name.startswith(self._elsewhere):
            return True
        return is_ignored(name, tied=self.lm_head.tied, unread_layers=unread, without_kv=without_kv)

    @cached_property
    def _elsewhere(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that other stages alone have."""
        others = (index for index in range(self.spec.num_layers) if index not in self.held)
        layers = [self.names.layer.format(index) for index in others]
        asked = {slot.name for group in self.weight_groups() for slot in group.slots}
        ends = [*self.embedding_groups(), *self.head_groups()]
        return (*layers, *({slot.name for group in ends for slot in group.slots} - asked))
