"""The interface of an attention backend: five methods for CUDA kernels with graphs, native CPU kernels, plain torch.

A layer's cache is a strided view `kv: [num_blocks, 2, num_kv_heads, block_size, head_size]` of the pool, K at index 0
of the second axis and V at 1. Only the last axis is sure to have stride 1; in an int8 cache each row ends with its
scale (attention/int8_rows.py). If `AttentionSpec.value_size` is set, V is a part of K: the second axis then holds only
K, and the output has `value_size` elements a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.kernels.ops import HeadNormWeights, Ops, Rotation


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention that a backend is made for: the spec of each KV group, and settings common to all of them."""

    groups: tuple[AttentionSpec, ...]
    """Attention of the layers of each KV group, with the heads that this rank holds."""
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    """Type of the cache; None = `dtype`. A float8 cache holds K / k_scale and V / v_scale, saturated; an int8 cache has
    a scale in each row (attention/int8_rows.py); other types have no scales."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    """`k_scale` and `v_scale` apply to layers without scales of their own."""
    is_encoder: bool = False
    """Whether tokens also attend to later ones and no KV is kept; each group is then one kind of layers."""
    shares_prefixes: bool = False
    """Whether a prefix that several sequences share may be read once for all of them; results stay bit-identical."""
    max_seq_len: int | None = None
    """Maximum length of a sequence, if it is known; backends choose fixed sizes by it."""

    def __post_init__(self) -> None:
        if (self.k_scale, self.v_scale) != (1.0, 1.0) and not self.has_float8:
            raise ValueError(f"k_scale and v_scale are for float8 caches, not for {self.cache_dtype}")

    @property
    def scales(self) -> KVScales:
        return KVScales(self.k_scale, self.v_scale)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def has_float8(self) -> bool:
        return self.cache_dtype.is_floating_point and self.cache_dtype.itemsize == 1

    def first_reason(self, reason: Callable[[AttentionSpec], str | None], *, block_sparse: bool = False) -> str | None:
        """Return the reason why some group's layers cannot be served, by any backend or by the `reason` of this one;
        None if all can. `block_sparse`: the backend supports block-sparse patterns."""
        if self.cache_dtype == torch.int8 and any(spec.value_size is not None for spec in self.groups):
            return "an int8 KV cache does not go with latent attention, whose V is a part of K; use fp8"
        if self.cache_dtype.itemsize == 1 and any(spec.index_size for spec in self.groups):
            return "a KV cache of 8 bits does not go with sparse attention, whose index is kept in it; use auto"
        return next((why for spec in self.groups if (why := _reason(spec, block_sparse) or reason(spec))), None)


def _reason(spec: AttentionSpec, block_sparse: bool) -> str | None:
    """Reason why no backend's kernels can serve such layers, or None."""
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads evenly"
    if spec.alibi_slopes is not None and len(spec.alibi_slopes) != spec.num_heads:
        return f"there are {len(spec.alibi_slopes)} ALiBi slopes for {spec.num_heads} heads"
    if spec.block_sparse is not None and not block_sparse:
        return "it has no block-sparse attention, which the backend paged has"
    return None


def check_sinks(sinks: torch.Tensor | None, spec: AttentionSpec) -> None:
    """Raise ValueError unless `sinks` are given exactly if `spec` has sinks, and have the type and shape that kernels
    read: float32 [num_heads], contiguous."""
    if spec.sinks != (sinks is not None):
        given = "no sinks" if sinks is None else "sinks"
        raise ValueError(f"attend was given {given} for layers whose spec says sinks={spec.sinks}")
    if sinks is None:
        return
    shape = (spec.num_heads,)
    if sinks.dtype != torch.float32 or sinks.shape != shape or not sinks.is_contiguous():
        raise ValueError(f"sinks must be float32 {list(shape)}, contiguous, got {sinks.dtype} {list(sinks.shape)}")


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's Q, K and V of a step; rows may be strided, the heads of a row are contiguous."""

    query: torch.Tensor  # [num_tokens, num_heads, head_size]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_size]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_size]; where V is a part of K, that part of `key`
    rotation: Rotation | None = None
    """The rotary embedding that Q and K still lack, to be applied before K is stored; None = none."""
    norms: HeadNormWeights | None = None
    """Norms that Q and K still lack, applied before the rotation; only backends with `fuses_norms` get any."""

    def turn(self, ops: Ops) -> None:
        """Turn Q and K in place by `rotation`, if they lack one."""
        if self.rotation is not None:
            ops.rotate(self.query, self.rotation)
            ops.rotate(self.key, self.rotation)


class Attend(NamedTuple):
    """Arguments of one layer's call of `AttentionBackend.attend`, which documents them, without the batch."""

    query: torch.Tensor
    kv: torch.Tensor
    group: int
    out: torch.Tensor
    sinks: torch.Tensor | None
    scales: KVScales | None
    new: Heads | None


@runtime_checkable
class LoadsKernels(Protocol):
    """A backend with kernels that have to be compiled or loaded before they run."""

    def load_kernels(self) -> None:
        """Load the kernels that only some steps launch, so that no request waits for them."""
        ...


class AttentionBackend(ABC):
    """One implementation of paged attention. Stateless between steps: a step's data is in `batch.plan`.

    A CUDA graph captures `write_kv` and `attend`; the other methods run outside of it, `prepare` once and `refresh`
    before each replay.
    """

    graph_safe: bool = False
    """Whether a captured graph may be replayed for other steps: the recorded work reads all that changes from step to
    step from memory, never through Python."""

    fuses_norms: bool = False
    """Whether `write_kv` applies `Heads.norms`."""

    sees_images: bool = False
    """Whether the backend reads `StepBatch.images`; others are wrapped in WholeImages for models that need it."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @classmethod
    @abstractmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        """None if this backend can serve `shape`, else the reason why not, as a clause for an error message."""

    @property
    def layout_name(self) -> str:
        """Name of the layout of K and V within a block; backends with the same name can read each other's blocks."""
        return type(self).__name__

    @abstractmethod
    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Peak bytes of scratch memory of a step within these limits, which the KV cache must leave free."""

    @abstractmethod
    def prepare(self, batch: StepBatch) -> None:
        """Fill `batch.plan` with the work that the step's layers share. Called once per step, before the forward."""

    def refresh(  # noqa: B027 - there is nothing to do without graphs
        self, batch: StepBatch, seq_lens: NDArray[np.integer[Any]], tables: Sequence[NDArray[np.int32]] = ()
    ) -> None:
        """Update a graph's plan in place for its next replay: sequences of these lengths with one row each, then
        padding. `tables`: the sequences' block tables of each KV group, [len(seq_lens), any], from which shared
        prefixes are found; empty: nothing is shared."""

    @abstractmethod
    def write_kv(
        self,
        heads: Heads,
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        batch: StepBatch,
        group: int,
        scales: KVScales | None = None,
    ) -> None:
        """Turn Q and K in place by `heads.rotation` and store K and V at their slots, except at PAD_SLOT.

        `scales` are the layer's, for float8 caches only; None: the shape's. `attend` needs the same.
        `group` is the layer's KV group: an index into `shape.groups`, `batch.block_tables` and `batch.slot_mapping`.
        """

    def attend(  # noqa: PLR0913 - what only some layers have comes last
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size], rows may be strided
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        batch: StepBatch,
        group: int,
        out: torch.Tensor,  # [num_tokens, num_heads, head_size or value_size]
        sinks: torch.Tensor | None = None,  # float32 [num_heads], contiguous, on the device
        *,
        scales: KVScales | None = None,
        new: Heads | None = None,
    ) -> None:
        """Causal attention of each sequence's rows over its cached tokens into `out`; padding rows become zero.

        With a window the query at position i sees the positions (i - window, i]. If the group's spec has
        `whole_images`, a query in one of the batch's `images` also sees the later positions of that image. Table
        entries that no row of the step sees may name blocks of other sequences by now: their content may hold NaN and
        must not even be multiplied by zero.

        `sinks` holds one more logit for each head of this rank, exactly if the group's spec has sinks. It joins the
        softmax of every row as it is, neither scaled nor capped nor subject to a window, and attends to nothing, so a
        row's weights add up to less than 1. Raises ValueError where `check_sinks` does.

        `new`: the heads that the layer passed to `write_kv` in this step, K rotated, which a backend may read in place
        of the cache. None: the layer attends to KV that another layer wrote.
        """
        check_sinks(sinks, self.shape.groups[group])
        self.attend_layer(Attend(query, kv, group, out, sinks, scales, new), batch)

    @abstractmethod
    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        """Implement `attend`, which has checked the sinks."""
