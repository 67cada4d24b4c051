"""Paged attention by the CUDA kernels of csrc/cuda.

A step may mix decodes (sequences with one row) and chunks of prompts. Each kernel gets a list of its work
(attention/cuda_plan.py): `decode_attention` the sequences with one row, those with a few rows after a long context, and
padding, which it clears; `prefill_attention` the tiles of all others. A kernel without work is not launched. float32
models run on one simple kernel for both. Where a table of measurements (kernels/cuda/attention/prefill_table.py) says
that it is faster, torch's FlashAttention takes whole prompts, on the layer's new K and V, and chunks after a prefix, on
a copy of their pages.

For CUDA graphs: `write_kv` and `attend` only launch, with grids computed from the batch's sizes. Their other inputs are
in `batch.plan`, which the owner of a graph keeps and `refresh` updates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import Attend, AttentionBackend, AttentionShape, Heads
from vllm_lite.attention.cuda_plan import Plan, Planner
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.cuda import cache_ops
from vllm_lite.kernels.cuda.attention.attention_inputs import PagedKV, Scoring, tensor_core_reason
from vllm_lite.kernels.cuda.attention.attention_simple import attention_simple
from vllm_lite.kernels.cuda.attention.attention_work import SplitList
from vllm_lite.kernels.cuda.attention.decode_attention import CASCADE_SOURCE, cascade_name, decode_attention
from vllm_lite.kernels.cuda.attention.latent_attention import WHOLE, latent_attention, latent_reason
from vllm_lite.kernels.cuda.attention.prefill_attention import prefill_attention
from vllm_lite.kernels.cuda.attention.prefill_table import PrefillTable, of_device
from vllm_lite.kernels.cuda.attention.torch_prefill import torch_prefill
from vllm_lite.kernels.cuda.attention.varlen import varlen_prefill
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.cuda.launcher import FLOAT8, Launcher
from vllm_lite.kernels.cuda.repeat import RepeatedLaunches

MIN_CAPABILITY = (8, 0)


class CudaBackend(AttentionBackend):
    """Attention for GPUs from sm_80 on: float16, bfloat16 and float32, their caches in the same type or in float8.

    A decoded row's bits do not depend on its batch. `launcher`: None for the process's own.
    """

    graph_safe = True
    fuses_norms = True

    def __init__(
        self, shape: AttentionShape, launcher: Launcher | None = None, table: PrefillTable | None = None
    ) -> None:
        """`table`: measurements by which to choose kernels for prompts; None: those of the shape's device."""
        super().__init__(shape)
        self.launcher = launcher or own_launcher("cuda")
        table = of_device(shape.device) if table is None else table
        self.planner = None if shape.dtype == torch.float32 else Planner(shape, table)
        self._scorings = [scoring_of(spec, shape) for spec in shape.groups]

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        return device_reason(shape, kernels_reason)

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Maximum that `prepare` and `attend` allocate for `max_num_seqs` sequences of up to `max_seq_len` tokens."""
        return 0 if self.planner is None else self.planner.workspace_bytes(max_num_tokens, max_num_seqs, max_seq_len)

    def load_kernels(self) -> None:
        shape = self.shape
        for spec in self.planner.sharing if self.planner is not None else ():
            name = cascade_name(shape.dtype, shape.cache_dtype, spec.head_size, shape.block_size)
            self.launcher.kernel(CASCADE_SOURCE, name)

    def prepare(self, batch: StepBatch) -> None:
        if self.planner is None:
            batch.plan = Plan()
        elif batch.host is None:
            batch.plan = self.planner.for_graph(batch)
        else:
            batch.plan = self.planner.for_step(batch.host, batch.num_tokens)

    def refresh(
        self, batch: StepBatch, seq_lens: NDArray[np.integer[Any]], tables: Sequence[NDArray[np.int32]] = ()
    ) -> None:
        if self.planner is not None:
            self.planner.refresh(batch.plan, batch, seq_lens, tables)

    def write_kv(
        self, heads: Heads, kv: torch.Tensor, batch: StepBatch, group: int, scales: KVScales | None = None
    ) -> None:
        rows, rotation, norms = (heads.query, heads.key, heads.value), heads.rotation, heads.norms
        places = kv
        if self.shape.groups[group].value_size:  # V is a part of K and stored with it
            rows, places = (heads.query, heads.key, heads.key), kv.expand(-1, 2, -1, -1, -1)

        def write(launcher: Launcher) -> None:
            slots = cache_ops.CacheSlots(places, batch.slot_mapping[group], *(scales or self.shape.scales))
            if rotation is None:
                cache_ops.reshape_and_cache(launcher, *rows[1:], slots)
            elif norms is None:
                cache_ops.rope_and_cache(launcher, *rows, rotation, slots)
            else:
                cache_ops.norm_rope_and_cache(launcher, rows, norms, rotation, slots)

        alike = ("write_kv", group, scales, None if rotation is None else rotation.cos.data_ptr(), norms is None)
        changing = [kv] if norms is None else [kv, norms.query, norms.key]
        self._launch(batch.plan, alike, rows, changing, write)

    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        query, kv, group, out, sinks, scales, new = call
        fresh = batch.plan.fresh[group] if new is not None and batch.plan.fresh else None

        def attend(launcher: Launcher) -> None:
            cache = PagedKV(kv, batch.block_tables[group], batch.query_start_loc, batch.seq_lens)
            scoring, plan = scoring_with(self._scorings[group], sinks, scales), batch.plan
            if self.shape.groups[group].value_size:
                self._attend_latents(launcher, out, query, cache, plan, group)
                return
            if self.planner is None:
                attention_simple(launcher, out, query, cache, scoring)
                return
            decodes, prefills = plan.decodes[group], plan.prefills[group] if fresh is None else fresh.rest
            if decodes is not None:
                decode_attention(launcher, out, query, cache, decodes, scoring, workspace=plan.workspace)
            if prefills is not None:
                prefill_attention(launcher, out, query, cache, prefills, scoring)

        changing = [kv, *kv[:, 1:].unbind(1)[:1]] if sinks is None else [kv, kv[:, 1], sinks]
        self._launch(batch.plan, ("attend", group, scales, fresh is None), (query, out), changing, attend)
        if fresh is not None and new is not None:
            torch_prefill(out, query, new.key, new.value, fresh.prompts, self._scorings[group].scale)
        if batch.plan.gathered and (chunks := batch.plan.gathered[group]) is not None:
            where = kv, batch.block_tables[group], batch.seq_lens, chunks
            own, q_scale = scales or (self.shape.k_scale, self.shape.v_scale), self._scorings[group].scale
            varlen_prefill(self.launcher, out, query, *where, scale=q_scale, k_scale=own[0], v_scale=own[1])

    def _attend_latents(
        self,
        launcher: Launcher,
        out: torch.Tensor,
        query: torch.Tensor,
        cache: PagedKV,
        plan: Plan,
        group: int,
    ) -> None:
        scale, decodes, prompts = self.shape.groups[group].scale, plan.decodes[group], plan.prefills[group]
        if decodes is not None:
            latent_attention(launcher, out, query, cache, decodes, scale, workspace=plan.workspace)
        if prompts is not None:
            rows = SplitList(prompts, several=False)
            latent_attention(launcher, out, query, cache, rows, scale, split_tokens=WHOLE)

    def _launch(
        self,
        plan: Plan,
        alike: tuple[Any, ...],
        rows: tuple[torch.Tensor, ...],
        changing: list[torch.Tensor],  # the cache first
        call: Callable[[Launcher], None],
    ) -> None:
        """Run `call`, or repeat with this layer's tensors the launches of an earlier layer of the step that had the
        same `alike`, `rows` at the same addresses and a cache with the same strides."""
        kv = changing[0]
        key = (*alike, *(part.data_ptr() for part in rows), rows[0].stride(0), kv.stride(), kv.data_ptr() % 16)
        if (kept := plan.launches.get(key)) is not None:
            kept.again(changing)
            return
        plan.launches[key] = launches = RepeatedLaunches(self.launcher, changing)
        call(launches)


def own_launcher(backend: str) -> Launcher:
    """Return the process's launcher. Raises ConfigError if there is none."""
    launcher = default_launcher()
    if launcher is None:
        raise ConfigError(f"the {backend} attention backend needs CuPy, which cannot be imported")
    return launcher


def scoring_of(spec: AttentionSpec, shape: AttentionShape) -> Scoring:
    """Return the kernels' scoring parameters for the layers of one KV group."""
    slopes = spec.alibi_slopes
    on_device = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device=shape.device)
    scales = (shape.k_scale, shape.v_scale)
    return Scoring(spec.scale, spec.soft_cap, on_device, spec.window, *scales, spec.block_sparse)


def scoring_with(scoring: Scoring, sinks: torch.Tensor | None, scales: KVScales | None) -> Scoring:
    """`scoring` with one layer's own sinks and scales."""
    if sinks is None and scales is None:
        return scoring
    key, value = scales or (scoring.k_scale, scoring.v_scale)
    return replace(scoring, sinks=sinks, k_scale=key, v_scale=value)


def device_reason(shape: AttentionShape, reason: Callable[[AttentionShape], str | None]) -> str | None:
    """The reason why a backend with CUDA kernels cannot serve `shape`: its device, or the kernels' own `reason`."""
    if shape.device.type != "cuda":
        return f"it runs on a CUDA device, not on {shape.device}"
    if why := reason(shape):
        return why
    capability = torch.cuda.get_device_capability(shape.device)
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 (Ampere), the device has {capability[0]}.{capability[1]}"
    return "CuPy cannot be imported" if default_launcher() is None else None


def kernels_reason(shape: AttentionShape) -> str | None:
    """None if there are kernels for `shape` on some device, else the reason why not."""
    if shape.block_size.bit_count() != 1:
        return f"its kernels take blocks of 2^n tokens, not of {shape.block_size}"

    def reason(spec: AttentionSpec) -> str | None:
        if spec.value_size is not None:
            return _latent_reason(spec, shape, spec.value_size)
        if shape.dtype != torch.float32:
            return tensor_core_reason(shape.dtype, spec.head_size, shape.cache_dtype)
        if spec.head_size > 256:
            return f"head size {spec.head_size} is above 256"
        if shape.cache_dtype not in (torch.float32, *FLOAT8):
            return f"a KV cache of {shape.cache_dtype} does not go with queries of {shape.dtype}"
        return None

    return shape.first_reason(reason)


def _latent_reason(spec: AttentionSpec, shape: AttentionShape, value_size: int) -> str | None:
    """See kernels_reason; for layers whose V is a part of K."""
    if spec.num_kv_heads != 1 or spec.window or spec.soft_cap or spec.sinks or spec.alibi_slopes is not None:
        return "its latent attention has one KV head, and neither a window, a soft cap, sinks nor ALiBi"
    if spec.index_size:
        return "it has no sparse attention, whose index lies in the cache behind the latents"
    return latent_reason(shape.dtype, spec.head_size, value_size, shape.cache_dtype)
