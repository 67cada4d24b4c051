"""The interface of an attention backend: five methods for CUDA kernels with graphs, native CPU kernels, plain torch.

A layer's cache is a strided view `kv: [num_blocks, 2, num_kv_heads, block_size, head_size]` of the pool, K at index 0
of the second axis and V at 1. Only the last axis is sure to have stride 1; in int8 it has the row's scale behind it, as
attention/int8_rows.py says. Where `AttentionSpec.value_size` says that V is a part of K, the second axis has K alone,
and what comes out has `value_size` elements a head.
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
    """The shape of attention that a backend is made for: of each KV group, and common to all."""

    groups: tuple[AttentionSpec, ...]
    """How the layers of each KV group attend, with the heads that this rank holds."""
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    """Type of the cache: None = `dtype`; in float8 what is stored is K / k_scale and V / v_scale, saturated; in int8
    each row has a scale of its own, see attention/int8_rows.py; others have no scales."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Those of layers that bring none of their own."""
    is_encoder: bool = False
    """Whether tokens see those behind them as well, and no KV is kept: then each group is a kind of layers."""
    shares_prefixes: bool = False
    """Whether what several sequences have in common may be read once for all of them, which changes no bit."""
    max_seq_len: int | None = None
    """The longest that a sequence may become, where it is known: backends choose sizes by it once and for all."""

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
        """Why the layers of some group cannot be served: what no backend can do, or the first `reason` that a backend
        gives; None if there is none. `block_sparse`: the backend has such patterns."""
        if self.cache_dtype == torch.int8 and any(spec.value_size is not None for spec in self.groups):
            return "an int8 KV cache does not go with latent attention, whose V is a part of K; use fp8"
        if self.cache_dtype.itemsize == 1 and any(spec.index_size for spec in self.groups):
            return "a KV cache of 8 bits does not go with sparse attention, whose index is kept in it; use auto"
        return next((why for spec in self.groups if (why := _reason(spec, block_sparse) or reason(spec))), None)


def _reason(spec: AttentionSpec, block_sparse: bool) -> str | None:
    """Why layers like these cannot be served, as far as that does not depend on the backend's kernels."""
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads evenly"
    if spec.alibi_slopes is not None and len(spec.alibi_slopes) != spec.num_heads:
        return f"there are {len(spec.alibi_slopes)} ALiBi slopes for {spec.num_heads} heads"
    if spec.block_sparse is not None and not block_sparse:
        return "it has no block-sparse attention, which the backend paged has"
    return None


def check_sinks(sinks: torch.Tensor | None, spec: AttentionSpec) -> None:
    """Raises ValueError where layers like `spec` have sinks and none are given, or the reverse, and for sinks that
    kernels would read as other numbers or past their end."""
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
    """One layer's Q, K and V of a step; rows may be strided, a row's heads stand side by side."""

    query: torch.Tensor  # [num_tokens, num_heads, head_size]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_size]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_size]; where V is a part of K, that part of `key`
    rotation: Rotation | None = None
    """The rotary embedding that Q and K still lack, to be applied before K is stored; None = none."""
    norms: HeadNormWeights | None = None
    """What Q and K lack before that; only backends that `fuses_norms` see any."""

    def turn(self, ops: Ops) -> None:
        """Turn Q and K in place by `rotation`, if they lack one."""
        if self.rotation is not None:
            ops.rotate(self.query, self.rotation)
            ops.rotate(self.key, self.rotation)


class Attend(NamedTuple):
    """One layer's call of `AttentionBackend.attend`, which says what each of these is, but for the batch."""

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
        """Load those that only some steps launch, so that no request waits for them."""
        ...


class AttentionBackend(ABC):
    """One way to compute paged attention. Stateless between steps: what a step needs is in `batch.plan`.

    Under a CUDA graph `write_kv` and `attend` are captured; the other methods run outside of it, `prepare` once and
    `refresh` before each replay.
    """

    graph_safe: bool = False
    """Whether graphs of its device may replay it for other steps than the one it was captured with: what changes from
    step to step is read from memory by what was recorded, and never by Python."""

    fuses_norms: bool = False
    """Whether `write_kv` takes heads that lack their norms."""

    sees_images: bool = False
    """Whether it reads `StepBatch.images`; what does not is wrapped in WholeImages where a model needs it."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @classmethod
    @abstractmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        """None when this backend can serve `shape`, else the reason why not, as a clause for an error message."""

    @property
    def layout_name(self) -> str:
        """Backends of one name lay K and V out alike."""
        return type(self).__name__

    @abstractmethod
    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Peak bytes of scratch memory that a step within these limits needs, to be left free beside the KV cache."""

    @abstractmethod
    def prepare(self, batch: StepBatch) -> None:
        """Fill `batch.plan` with all that the layers of this step can share. Once per step, before the forward."""

    def refresh(  # noqa: B027 - there is nothing to do without graphs
        self, batch: StepBatch, seq_lens: NDArray[np.integer[Any]], tables: Sequence[NDArray[np.int32]] = ()
    ) -> None:
        """Bring what `prepare` planned for a graph's batch up to date: its next replay has sequences of these lengths,
        each with one row, and padding behind them. The plan's memory stays where it is. `tables` are the sequences'
        block tables of each KV group, [len(seq_lens), any], for what they have in common; none: nothing is shared."""

    @abstractmethod
    def write_kv(
        self,
        heads: Heads,
        kv: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_size]
        batch: StepBatch,
        group: int,
        scales: KVScales | None = None,
    ) -> None:
        """Turn Q and K in place by `heads.rotation` and store K and V at their slots; PAD_SLOT's are not stored.

        `scales` are those of the layer, for float8 caches only; None: those of the shape. `attend` needs the same.
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

        With a window the query at position i sees the positions (i - window, i], and in an image of the batch's
        `images` those behind it in the image, too, if the group's spec says `whole_images`. Table entries of blocks
        that no row of the step sees name blocks that may belong to others by now: what is there must not even be
        multiplied by zero.

        `sinks` has one more logit for each head of this rank, where the group's spec says that there are some. It joins
        the softmax of every row as it is, neither scaled nor capped nor subject to a window, and attends to nothing, so
        a row's weights add up to less than 1. Raises ValueError for sinks of another shape or type, and unless they are
        given exactly where the spec says so.

        `new` are the heads that the layer's `write_kv` has just had, K rotated by now: the step's own part of what is
        attended to, which a backend may read in place of the cache. None: the layer attends to what another one wrote.
        """
        check_sinks(sinks, self.shape.groups[group])
        self.attend_layer(Attend(query, kv, group, out, sinks, scales, new), batch)

    @abstractmethod
    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        """The rest of `attend`, in which the sinks have been checked."""
