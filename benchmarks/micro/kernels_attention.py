"""Paged attention and cache writes on a CPU: our kernels and plain torch take turns in the same run.

Decoding is compared with the speed at which the same number of threads reads memory, since it uses each byte of the
cache once. Chunks of prompts are compared with the speed at which the threads multiply in registers. The cache has the
engine's layout, huge pages and blocks in random order, and is larger than the processor's caches. With one thread the
measured time is CPU time, which a busy machine hardly lengthens. Torch gathers the blocks of all sequences and calls
its fused attention once.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from micro.kernels_timing import Row, best_times, clock_for, name_of, peak_tflop_s, read_bandwidth_gb_s
from vllm_lite.attention.backend import AttentionShape, Heads
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.int8_rows import quantized, scale_bytes
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.step_batch import PAD_SLOT, StepBatch
from vllm_lite.checkpoint.model_spec import AttentionSpec
from vllm_lite.kernels.cpu.memory import zeros
from vllm_lite.kernels.ops import Rotation

NUM_SEQS, CONTEXT = 32, 1024
NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 128, 16
NUM_LAYERS = 2
"""Layers of the pool. The bytes of a block are contiguous over all layers, and a call reads those of one layer."""
GROUPS = (1, 4, 8)
"""Query heads per KV head."""
CHUNK, CONTEXTS = 512, (512, 2048, 8192)
PREFILL_HEAD_SIZES = (64, 128)
NUM_WRITTEN = (1, 32, 512)
WORKING_SET_BYTES = 128 << 20  # all caches of a chosen case together: more than the last-level cache of a socket
BYTE_GROUPS, BYTE_LENGTHS = (1, 2, 4, 8), ((NUM_SEQS, 1, CONTEXT), (1, 1, 8192), (1, CHUNK, 2048))
"""Cases for caches with one byte per element: query heads per KV head; and the number of sequences, the new tokens of
each and the context."""
SHARED = ((32, 1, 64, 4096), (63, 4, 4, 4000), (63, 19, 19, 4000), (32, 1, 64, 0))
"""Cases of a shared prefix: the number of sequences, the new tokens of each, the tokens that only this sequence has,
and the tokens before them that all sequences share."""
MIN_TIME_S = 0.5  # for each kernel


class HeadCounts(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_size: int


def sharing(group: int, head_size: int = HEAD_SIZE) -> HeadCounts:
    """Numbers of heads with NUM_KV_HEADS KV heads, each shared by `group` query heads."""
    return HeadCounts(NUM_KV_HEADS * group, NUM_KV_HEADS, head_size)


class AttentionSelection(NamedTuple):
    """A batch of equal sequences for attention."""

    num_seqs: int
    query_len: int
    seq_len: int
    heads: HeadCounts


def chosen(text: str) -> AttentionSelection:
    """Parse a case: sequences x new tokens @ context : heads / KV heads x head size, such as 32x1@1024:24/8x64. Raises
    ValueError if `text` does not have this form or its numbers do not fit."""
    found = re.fullmatch(r"(\d+)x(\d+)@(\d+):(\d+)/(\d+)x(\d+)", text, re.ASCII)
    numbers = [int(number) for number in found.groups()] if found else [0]
    if 0 in numbers:
        raise ValueError(
            "a case of attention must be sequences x new tokens @ context : heads / KV heads x head size, such as "
            f"32x1@1024:24/8x64, got {text!r}"
        )
    num_seqs, query_len, seq_len, num_heads, num_kv_heads, head_size = numbers
    case = AttentionSelection(num_seqs, query_len, seq_len, HeadCounts(num_heads, num_kv_heads, head_size))
    if case.query_len > case.seq_len:
        raise ValueError(f"{case.query_len} new tokens are more than the context of {case.seq_len} in {text!r}")
    if case.heads.num_heads % case.heads.num_kv_heads:
        raise ValueError(f"{case.heads.num_heads} heads cannot share {case.heads.num_kv_heads} KV heads in {text!r}")
    return case


class AttentionCase:
    """A batch of sequences of (query_len, seq_len), with a filled cache and all inputs of attention over it."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: HeadCounts,
        dtype: torch.dtype,
        layout: str = "block-major",
        kv_dtype: torch.dtype | None = None,
        common: int = 0,
    ) -> None:
        """All sequences share the blocks with the first `common` tokens of the first sequence."""
        device = torch.device("cpu")
        self.spec = AttentionSpec(*heads, scale=heads.head_size**-0.5)
        self.shape = AttentionShape((self.spec,), BLOCK_SIZE, dtype, device, kv_dtype)
        counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
        self.kv = cache(sum(counts), self.shape.cache_dtype, layout, heads)
        for block in self.kv:
            _fill(block, heads.head_size)
        ids = torch.randperm(sum(counts)).int().split(counts)
        table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, blocks in zip(table, ids, strict=True):
            row[: len(blocks)] = blocks
        table[:, : common // BLOCK_SIZE] = table[0, : common // BLOCK_SIZE]
        num_tokens = sum(query_len for query_len, _ in lengths)
        self.step = StepBatch(
            num_tokens=num_tokens,
            num_seqs=len(lengths),
            max_query_len=max(query_len for query_len, _ in lengths),
            max_seq_len=max(seq_len for _, seq_len in lengths),
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            query_start_loc=torch.tensor([0, *(query_len for query_len, _ in lengths)]).cumsum(0).int(),
            seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
            block_tables=(table,),
            slot_mapping=(torch.full((num_tokens,), PAD_SLOT),),
        )
        self.backend = CpuBackend(self.shape)
        self.backend.prepare(self.step)
        self.query = torch.randn(num_tokens, heads.num_heads, heads.head_size).to(dtype)
        self.out = torch.empty_like(self.query)
        query_len, seq_len = lengths[0]
        self.mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        self.lengths = lengths

    def attend(self) -> None:
        self.backend.attend(self.query, self.kv, self.step, 0, self.out)

    def attend_in_torch(self) -> torch.Tensor:
        """Compute the same in plain torch. All sequences must have the same lengths."""
        blocks = self.kv[self.step.block_tables[0].flatten()]
        sequences = blocks.unflatten(0, (len(self.lengths), -1)).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        key, value = sequences  # [num_seqs, num_kv_heads, seq_len, head_size]
        query = self.query.unflatten(0, (len(self.lengths), -1)).transpose(1, 2)
        mask = self.mask if self.lengths[0][0] > 1 else None
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def cache(num_blocks: int, dtype: torch.dtype, layout: str, heads: HeadCounts) -> torch.Tensor:
    """One layer's cache [num_blocks, 2, num_kv_heads, block_size, head_size], a view of memory in the named
    `layout`."""
    _, num_kv_heads, head_size = heads
    num_layers = 1 if layout == "layer by layer" else NUM_LAYERS
    inside = (BLOCK_SIZE, num_kv_heads) if layout == "heads inside tokens" else (num_kv_heads, BLOCK_SIZE)
    shape = (num_blocks, num_layers, 2, *inside, head_size + scale_bytes(dtype))
    layer = zeros(torch.Size(shape).numel(), dtype).view(shape)[:, 0]
    return layer.transpose(2, 3) if layout == "heads inside tokens" else layer


def _fill(block: torch.Tensor, head_size: int) -> None:
    """Write random K and V into one block of a cache of any type."""
    if block.dtype.itemsize > 1:
        block.normal_()
        return
    rows = torch.randn(*block.shape[:-1], head_size)
    kept = quantized(rows) if block.dtype == torch.int8 else rows.to(block.dtype)
    block.view(torch.uint8).copy_(kept.view(torch.uint8))


def measure(
    num_threads: int, cases: Sequence[AttentionSelection] = (), dtypes: Sequence[torch.dtype] = ()
) -> Iterator[Row]:
    """Measure `cases` in each of `dtypes`. Without cases: decoding, chunks of prompts, cache writes, layouts of the
    cache, caches with one byte per element, and shared prefixes."""
    if cases:
        yield from (row for dtype in dtypes for row in _chosen_cases(num_threads, cases, dtype))
        return
    yield from decoding(num_threads)
    for dtype in (torch.bfloat16, torch.float32):
        yield from prefill(num_threads, dtype)
    yield from writes(num_threads)
    yield from layouts(num_threads)
    yield from caches_of_a_byte(num_threads)
    yield from shared_prefixes(num_threads)


def batches_of(case: AttentionSelection, dtype: torch.dtype) -> list[AttentionCase]:
    """The batch of a case; with one new token per sequence as many of them as no processor cache can hold together."""
    batches = [AttentionCase([(case.query_len, case.seq_len)] * case.num_seqs, case.heads, dtype)]
    if case.query_len == 1:
        count = WORKING_SET_BYTES // _kv_bytes(batches[0])
        batches += [AttentionCase(batches[0].lengths, case.heads, dtype) for _ in range(count)]
    return batches


def _chosen_cases(num_threads: int, cases: Sequence[AttentionSelection], dtype: torch.dtype) -> Iterator[Row]:
    """Cases with one new token per sequence are compared with the speed of memory, and use several caches in turn,
    which no processor cache can hold together. Cases with more new tokens are compared with the speed of
    multiplications in registers."""
    for case in cases:
        batches, is_decode = batches_of(case, dtype), case.query_len == 1
        kv_bytes = _kv_bytes(batches[0])
        limit = read_bandwidth_gb_s(num_threads) if is_decode else peak_tflop_s(num_threads, dtype)
        (pass_s,) = best_times(clock_for(num_threads), [partial(attend_all, batches)], MIN_TIME_S)
        seconds = pass_s / len(batches)
        speed = kv_bytes / seconds / 1e9 if is_decode else _flops(batches[0]) / seconds / 1e12
        unit = "gb_s" if is_decode else "tflop_s"
        figures = {"us": seconds * 1e6, unit: speed, "limit": limit, "share": speed / limit}
        yield _row("decode" if is_decode else "prefill", batches[0], **figures)


def attend_all(batches: Sequence[AttentionCase]) -> None:
    for batch in batches:
        batch.attend()


def decoding(num_threads: int) -> Iterator[Row]:
    limit = 0.0
    for group in GROUPS:
        limit = max(limit, read_bandwidth_gb_s(num_threads))
        batch = AttentionCase([(1, CONTEXT)] * NUM_SEQS, sharing(group), torch.bfloat16)
        seconds, torch_s = best_times(clock_for(num_threads), [batch.attend, batch.attend_in_torch], MIN_TIME_S)
        speed = _kv_bytes(batch) / seconds / 1e9
        yield _row("decode", batch, gb_s=speed, limit=limit, share=speed / limit, ratio_torch=torch_s / seconds)


def prefill(num_threads: int, dtype: torch.dtype) -> Iterator[Row]:
    """The last CHUNK tokens of each of CONTEXTS, with four query heads per KV head."""
    limit = peak_tflop_s(num_threads, dtype)
    for head_size in PREFILL_HEAD_SIZES:
        for context in CONTEXTS:
            batch = AttentionCase([(CHUNK, context)], sharing(4, head_size), dtype)
            seconds, torch_s = best_times(clock_for(num_threads), [batch.attend, batch.attend_in_torch], MIN_TIME_S)
            speed = _flops(batch) / seconds / 1e12
            yield _row("prefill", batch, tflop_s=speed, limit=limit, share=speed / limit, ratio_torch=torch_s / seconds)


def writes(num_threads: int) -> Iterator[Row]:
    """Rotation of Q and K, and the write of K and V, with four query heads per KV head."""
    for num_tokens in NUM_WRITTEN:
        batch = AttentionCase([(num_tokens, max(num_tokens, CONTEXT))], sharing(4), torch.bfloat16)
        batch.step.slot_mapping = (torch.randperm(len(batch.kv) * BLOCK_SIZE)[:num_tokens],)
        key, value = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE).bfloat16()
        ones = torch.ones(num_tokens, HEAD_SIZE, dtype=torch.bfloat16)
        heads = Heads(batch.query, key, value, Rotation(cos=ones, sin=ones * 0))
        calls = [_writer(backend, batch, heads) for backend in (CpuBackend, ReferenceBackend)]
        seconds, torch_s = best_times(clock_for(num_threads), calls, MIN_TIME_S)
        yield _row("rotate and write", batch, us=seconds * 1e6, torch_us=torch_s * 1e6, ratio_torch=torch_s / seconds)


def _writer(
    backend_type: type[CpuBackend | ReferenceBackend], batch: AttentionCase, heads: Heads
) -> Callable[[], object]:
    """A function that writes `heads` to the cache, with a plan that is made once."""
    backend, step = backend_type(batch.shape), replace(batch.step)
    backend.prepare(step)
    return lambda: backend.write_kv(heads, batch.kv, step, 0)


def layouts(num_threads: int) -> Iterator[Row]:
    """Decoding over caches of different layouts; the engine's layout is block-major."""
    names = ("block-major", "layer by layer", "heads inside tokens")
    batches = [AttentionCase([(1, CONTEXT)] * NUM_SEQS, sharing(4), torch.bfloat16, name) for name in names]
    times = best_times(clock_for(num_threads), [batch.attend for batch in batches], MIN_TIME_S)
    for name, batch, seconds in zip(names, batches, times, strict=True):
        yield _row(f"decode, {name}", batch, gb_s=_kv_bytes(batch) / seconds / 1e9)


def caches_of_a_byte(num_threads: int) -> Iterator[Row]:
    """Attention over caches in bfloat16, int8 and float8, in turn. `ratio` is the time over that with bfloat16."""
    types = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    for (num_seqs, query_len, seq_len), group in itertools.product(BYTE_LENGTHS, BYTE_GROUPS):
        lengths = [(query_len, seq_len)] * num_seqs
        batches = [AttentionCase(lengths, sharing(group), torch.bfloat16, kv_dtype=kind) for kind in types]
        times = best_times(clock_for(num_threads), [batch.attend for batch in batches], MIN_TIME_S)
        for kind, batch, seconds in zip(types, batches, times, strict=True):
            yield _row(f"cache in {name_of(kind)}", batch, us=seconds * 1e6, ratio=seconds / times[0])


def shared_prefixes(num_threads: int) -> Iterator[Row]:
    """Sequences after one common prompt, whose blocks are read once for each sequence (`apart_us`) or once for all
    (`us`), in turn. The last case of SHARED has no common prompt, so it shows the cost of searching for one."""
    for num_seqs, query_len, own, common in SHARED:
        for kv_dtype in (torch.bfloat16, torch.int8):
            lengths = [(query_len, max(common, CONTEXT) + own)] * num_seqs
            batch = AttentionCase(lengths, sharing(2), torch.bfloat16, kv_dtype=kv_dtype, common=common)
            calls = []
            for shares in (False, True):
                backend, step = CpuBackend(replace(batch.shape, shares_prefixes=shares)), replace(batch.step)
                calls.append(partial(_plan_and_attend, backend, batch, step))
            apart_s, once_s = best_times(clock_for(num_threads), calls, MIN_TIME_S)
            name = f"{common} in common, cache in {name_of(kv_dtype)}"
            yield _row(name, batch, us=once_s * 1e6, apart_us=apart_s * 1e6, ratio=once_s / apart_s)


def _plan_and_attend(backend: CpuBackend, batch: AttentionCase, step: StepBatch) -> None:
    backend.prepare(step)
    backend.attend(batch.query, batch.kv, step, 0, batch.out)


def _kv_bytes(batch: AttentionCase) -> int:
    row = batch.kv.shape[-1] * batch.kv.itemsize
    return sum(seq_len for _, seq_len in batch.lengths) * 2 * batch.spec.num_kv_heads * row


def _flops(batch: AttentionCase) -> float:
    """Floating-point operations of both products of attention, over the keys that each row sees."""
    seen = sum(query_len * (seq_len - (query_len - 1) / 2) for query_len, seq_len in batch.lengths)
    return 4 * batch.spec.head_size * batch.spec.num_heads * seen


def _row(kernel: str, batch: AttentionCase, **figures: float) -> Row:
    query_len, seq_len = batch.lengths[0]
    tokens = f"{len(batch.lengths)} x {query_len} of {seq_len}"
    heads = f"{batch.spec.num_heads}/{batch.spec.num_kv_heads} x {batch.spec.head_size}"
    return {"kernel": kernel, "shape": f"{tokens}, heads {heads}, {name_of(batch.shape.dtype)}", **figures}
