"""The emulator gives the results of a GPU, and detects the mistakes that it promises to detect."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels import emulator

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")

ONE = (1, 1, 1)

# One source, so that one run of the compiler builds every kernel of this module.
SOURCE = r"""
template <class T> __global__ void convert(float* wide, T* narrow, const T* from, const float* values, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  wide[i] = to_float(from[i]);
  narrow[i] = from_float<T>(values[i]);
}
template <class T, class Fp8> __global__ void widen(unsigned* out, const unsigned* codes) {
  out[threadIdx.x] = widen2<T, Fp8>(codes[threadIdx.x]);
}
template <class T> __global__ void one_mma(float* d, const unsigned* a, const unsigned* b) {
  const int lane = threadIdx.x;
  const unsigned mine[4] = {a[lane * 4], a[lane * 4 + 1], a[lane * 4 + 2], a[lane * 4 + 3]};
  float sum[4] = {d[lane * 4], d[lane * 4 + 1], d[lane * 4 + 2], d[lane * 4 + 3]};
  mma_m16n8k16<T>(sum, mine, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = sum[i];
}
__global__ void warp_operations(int* out) {
  const int lane = threadIdx.x % 32;
  int* mine = out + threadIdx.x * 8;
  mine[0] = __shfl_sync(~0u, lane, 5);
  mine[1] = __shfl_xor_sync(~0u, lane, 3);
  mine[2] = __shfl_down_sync(~0u, lane, 2);
  mine[3] = __shfl_up_sync(~0u, lane, 2);
  mine[4] = __shfl_sync(~0u, lane, 9, 8);
  mine[5] = int(__ballot_sync(~0u, lane % 3 == 0));
  mine[6] = __any_sync(~0u, lane == 31) + 2 * __all_sync(~0u, lane >= 0) + 4 * __all_sync(~0u, lane);
  mine[7] = int(__byte_perm(0x33221100u + lane, 0x77665544u, 0x7140));
}
__global__ void reductions(float* out, const float* in, int* count) {
  DYNAMIC_SHARED(float, scratch);
  const float x = in[threadIdx.x];
  out[threadIdx.x * 4] = group_sum<8>(x);
  out[threadIdx.x * 4 + 1] = warp_max(x);
  out[threadIdx.x * 4 + 2] = block_sum(x, scratch);
  out[threadIdx.x * 4 + 3] = block_max(x, scratch);
  atomicAdd(count, 1);
  atomicMax(count + 1, int(threadIdx.x));
}
__global__ void groups(float* out, const float* in) {  // three, and a copy that is in none
  DYNAMIC_SHARED(float, copied);
  for (int i = 0; i < 4; ++i) {
    copy_async_16(copied + 4 * i, in + 4 * i, true);
    if (i < 3) copy_async_commit();
  }
  copy_async_wait_but<1>();
  for (int i = 0; i < 4; ++i) out[i] = copied[4 * i];
  copy_async_wait_but<0>();
  for (int i = 0; i < 4; ++i) out[4 + i] = copied[4 * i];
  copy_async_wait();
  for (int i = 0; i < 4; ++i) out[8 + i] = copied[4 * i];
}
__global__ void indices(int* out) {
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
__global__ void neighbour(float* out, int barrier) {  // wrong without a barrier
  DYNAMIC_SHARED(float, shared);
  shared[threadIdx.x] = float(threadIdx.x);
  if (barrier) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 32) % blockDim.x];
}
__global__ void lanes(float* out, int barrier) {  // the same inside a warp
  DYNAMIC_SHARED(float, shared);
  shared[threadIdx.x] = float(threadIdx.x);
  if (barrier) __syncwarp();
  out[threadIdx.x] = shared[31 - threadIdx.x];
}
__global__ void last_block_wins(float* out) { out[0] = float(blockIdx.x); }
__global__ void half_a_barrier() {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void two_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void half_a_warp() {
  if (threadIdx.x < 16) __syncwarp();
}
__global__ void mixed_warp() {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    __ballot_sync(~0u, 1);
}
__global__ void short_mask() { __syncwarp(0xffff); }
__global__ void write_past(int at) {
  DYNAMIC_SHARED(float, shared);
  shared[at] = 1.f;
}
__global__ void read_at(float* out, const float* in, int offset) { out[0] = load_as<float4>(in + offset).x; }
__global__ void deep(int* out) {
  volatile char big[1 << 16];
  big[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = big[threadIdx.x];
}
"""
TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
NAMES = [
    *(f"convert<{name}>" for name in TYPES.values()),
    *(f"widen<{wide}, {fp8}>" for wide in ("__half", "__nv_bfloat16") for fp8 in ("fp8_e4m3", "fp8_e5m2")),
    *(f"one_mma<{name}>" for name in ("__half", "__nv_bfloat16")),
    *("warp_operations", "reductions", "indices", "neighbour", "lanes", "last_block_wins", "half_a_barrier"),
    *("two_barriers", "half_a_warp", "mixed_warp", "short_mask", "write_past", "read_at", "deep"),
]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., emulator.EmulatedKernel]:
    folder = emulator.source_in(SOURCE, tmp_path_factory.mktemp("sources"))
    emulator.EmulatorLauncher(sources=folder).preload("test.cuh", NAMES)
    return lambda name, seed=0: emulator.EmulatorLauncher(seed, folder).kernel("test.cuh", name)


# ---- it gives the results of a GPU


@pytest.mark.parametrize("dtype", TYPES)
def test_conversions(dtype: torch.dtype, kernel) -> None:
    size = dtype.itemsize
    codes = torch.arange(256 if size == 1 else 65536)
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.float32}
    narrow = codes.to(bits[size]).view(dtype)
    n = len(narrow)
    # All distinct values, ties, subnormals and both zeros, without those that become NaN in torch and saturate on a
    # GPU.
    limit = torch.finfo(dtype).max if size == 1 else 1e30
    exact = narrow.float().nan_to_num(0, 0, 0)
    ties = (exact + exact.roll(-1)) / 2
    values = (ties if n == 256 else torch.randn(n) * torch.logspace(-12, 12, n)).clamp(-limit, limit)
    wide, back = torch.empty(n), torch.empty(n, dtype=dtype)
    kernel(f"convert<{TYPES[dtype]}>")(((n + 255) // 256, 1, 1), (256, 1, 1), [wide, back, narrow, values, np.int32(n)])
    assert torch.equal(wide.nan_to_num(7e7), narrow.float().nan_to_num(7e7))
    assert torch.equal(back.float(), values.to(dtype).float())


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_fp8_saturates(dtype: torch.dtype, largest: float, kernel) -> None:
    values = torch.tensor(
        [largest, largest * 1.03, largest * 2, 3e38, float("inf"), -float("inf"), float("nan"), 1e-30]
    )
    narrow, wide = torch.zeros(8).to(dtype), torch.empty(8)
    out = torch.empty(8, dtype=dtype)
    kernel(f"convert<{TYPES[dtype]}>")(ONE, (8, 1, 1), [wide, out, narrow, values, np.int32(8)])
    assert out.float()[:6].tolist() == [largest] * 5 + [-largest]
    assert out.float()[6].isnan()
    assert out.float()[7] == 0


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16])
def test_widen_pairs(wide: torch.dtype, fp8: torch.dtype, kernel) -> None:
    codes = torch.arange(256).to(torch.uint8)
    finite = codes.view(fp8).float().isfinite()
    pairs = torch.zeros(256, 4, dtype=torch.uint8)
    pairs[:, 0], pairs[:, 1] = codes, codes.flip(0)
    out = torch.empty(256, dtype=torch.int32)
    kernel(f"widen<{TYPES[wide]}, {TYPES[fp8]}>")(ONE, (256, 1, 1), [out, pairs.view(torch.int32).flatten()])
    got = out.view(wide).reshape(256, 2).float()
    assert torch.equal(got[finite, 0], codes.view(fp8).float()[finite])
    assert torch.equal(got[finite.flip(0), 1], codes.view(fp8).float().flip(0)[finite.flip(0)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mma_has_the_layout_of_the_manual(dtype: torch.dtype, kernel) -> None:
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    lane = torch.arange(32)
    group, quad = lane // 4, lane % 4
    # PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": rows and columns of each register's halves.
    rows = torch.stack([group, group, group + 8, group + 8] * 2, 1)
    columns = torch.stack([quad * 2, quad * 2 + 1] * 2 + [quad * 2 + 8, quad * 2 + 9] * 2, 1)
    a_regs = a[rows, columns].contiguous().view(torch.int32)
    b_rows = torch.stack([quad * 2, quad * 2 + 1, quad * 2 + 8, quad * 2 + 9], 1)
    b_regs = b[b_rows, group[:, None].expand(-1, 4)].contiguous().view(torch.int32)
    d_rows, d_columns = (
        torch.stack([group, group, group + 8, group + 8], 1),
        torch.stack([quad * 2, quad * 2 + 1] * 2, 1),
    )
    d = c[d_rows, d_columns].contiguous()
    kernel(f"one_mma<{TYPES[dtype]}>")(ONE, (32, 1, 1), [d, a_regs, b_regs])
    expected = (a.double() @ b.double() + c)[d_rows, d_columns]
    assert (d - expected).abs().max() < 1e-5


def test_warp_operations(kernel) -> None:
    out = torch.empty(64, 8, dtype=torch.int32)
    kernel("warp_operations")(ONE, (64, 1, 1), [out])
    for thread in (0, 7, 30, 31, 63):
        lane = thread % 32
        expected = [5, lane ^ 3, lane + 2 if lane < 30 else lane, lane - 2 if lane > 1 else lane, lane // 8 * 8 + 1]
        ballot = sum(1 << i for i in range(0, 32, 3))
        expected += [ballot, 3, int.from_bytes(bytes([lane, 0x44, 0x11, 0x77]), "little")]
        assert out[thread].tolist() == expected


def test_reductions_and_atomics(kernel) -> None:
    x = torch.randint(-50, 50, (96,)).float()
    out, count = torch.empty(96, 4), torch.zeros(2, dtype=torch.int32)
    kernel("reductions")(ONE, (96, 1, 1), [out, x, count], 32 * 4)
    assert torch.equal(out[:, 0], x.reshape(-1, 8).sum(1).repeat_interleave(8))
    assert torch.equal(out[:, 1], x.reshape(-1, 32).amax(1).repeat_interleave(32))
    assert torch.equal(out[:, 2], x.sum().expand(96))
    assert torch.equal(out[:, 3], x.max().expand(96))
    assert count.tolist() == [96, 95]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_indices(seed: int, kernel) -> None:
    out = torch.empty(2 * 3 * 4, 5 * 3 * 2, dtype=torch.int32)
    kernel("indices", seed)((2, 3, 4), (5, 3, 2), [out])
    assert torch.equal(out, torch.arange(24)[:, None].int() * 1000 + torch.arange(30).int())


# ---- it finds mistakes


def test_shared_memory_read_before_it_is_written(kernel) -> None:
    out, again = torch.empty(128), torch.empty(128)
    kernel("neighbour")(ONE, (128, 1, 1), [out, np.int32(1)], 512)
    assert torch.equal(out, (torch.arange(128.0) + 32) % 128)
    kernel("neighbour")(ONE, (128, 1, 1), [again, np.int32(0)], 512)
    assert again[:96].isnan().all()


def test_a_group_of_copies_is_there_when_it_was_waited_for(kernel) -> None:
    out = torch.empty(12)
    kernel("groups")(ONE, ONE, [out, torch.arange(16.0)], 64)
    assert out.nan_to_num(-1).view(3, 4).tolist() == [[0, 4, -1, -1], [0, 4, 8, -1], [0, 4, 8, 12]]


def test_order_seed_shows_a_missing_barrier(kernel) -> None:
    for name, threads in (("neighbour", 128), ("lanes", 32)):
        with_barrier: set[tuple[float, ...]] = set()
        without: set[tuple[float, ...]] = set()
        for seed in range(6):
            for barrier, seen in ((1, with_barrier), (0, without)):
                out = torch.empty(threads)
                kernel(name, seed)(ONE, (threads, 1, 1), [out, np.int32(barrier)], 512)
                seen.add(tuple(out.nan_to_num(-1).tolist()))
        assert len(with_barrier) == 1
        assert len(without) > 1, name


def test_order_seed_shows_a_race_of_blocks(kernel) -> None:
    out = torch.empty(1)
    results = set()
    for seed in range(4):
        kernel("last_block_wins", seed)((7, 1, 1), (32, 1, 1), [out])
        results.add(out.item())
    assert results == {0.0, 6.0}


@pytest.mark.parametrize(
    ("name", "threads", "message"),
    [
        ("half_a_barrier", 64, "not every thread of the block reached this barrier .__syncthreads, line"),
        ("two_barriers", 64, "different barriers"),
        ("half_a_warp", 32, "not every thread of the warp reached this operation .__syncwarp, line"),
        ("mixed_warp", 32, "different operations"),
        ("short_mask", 32, "fewer than 32 lanes"),
        ("mixed_warp", 24, "fewer than 32 threads"),
        ("half_a_barrier", 1025, "1 to 1024 threads"),
        ("half_a_barrier", 0, "1 to 1024 threads"),
    ],
)
def test_divergence(name: str, threads: int, message: str, kernel) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: .*{message}"):
        kernel(name)(ONE, (threads, 1, 1), [])


def test_shared_memory_past_its_end(kernel) -> None:
    kernel("write_past")(ONE, (1, 1, 1), [np.int32(31)], 128)
    with pytest.raises(RuntimeError, match="written past the size"):
        kernel("write_past")(ONE, (1, 1, 1), [np.int32(32)], 128)
    with pytest.raises(RuntimeError, match="more shared memory"):
        kernel("write_past")(ONE, (1, 1, 1), [np.int32(0)], 228 * 1024)


def test_unaligned_vectors(kernel) -> None:
    out, values = torch.empty(1), torch.arange(16.0)
    kernel("read_at")(ONE, ONE, [out, values, np.int32(4)])
    assert out.item() == 4
    with pytest.raises(RuntimeError, match="not aligned"):
        kernel("read_at")(ONE, ONE, [out, values, np.int32(5)])


def test_deep_stacks(kernel) -> None:
    out = torch.zeros(1024, dtype=torch.int32)
    kernel("deep")(ONE, (1024, 1, 1), [out])
    assert out.all()


def test_arguments_that_do_not_fit(kernel) -> None:
    read, n = kernel("read_at"), np.int32(0)
    out = torch.zeros(4)
    with pytest.raises(TypeError, match="argument 2 is a int; a kernel takes"):
        read(ONE, ONE, [out, out, 0])
    with pytest.raises(TypeError, match="argument 2 is a int64, its parameter a int"):
        read(ONE, ONE, [out, out, np.int64(0)])
    with pytest.raises(TypeError, match=r"argument 1 is a tensor of torch.float64, its parameter a const float\*"):
        read(ONE, ONE, [out, out.double(), n])
    with pytest.raises(TypeError, match="2 arguments for 3 parameters"):
        read(ONE, ONE, [out, out])
    with pytest.raises(TypeError, match="lies on meta"):
        read(ONE, ONE, [out, out.to("meta"), n])


def test_static_shared_memory_does_not_compile(tmp_path: Path) -> None:
    folder = emulator.source_in("__global__ void wrong() { __shared__ float x[4]; x[0] = 1; }", tmp_path)
    with pytest.raises(RuntimeError, match="use_DYNAMIC_SHARED"):
        emulator.EmulatorLauncher(sources=folder).kernel("test.cuh", "wrong")
