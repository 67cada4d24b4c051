"""The table of what steps cost the host: counts of the work, without times."""

import cuda_costs
import pytest

from tests.kernels import nvrtc


def test_a_row_of_each_kind() -> None:
    mixed = cuda_costs.cost_of("255 decodes of 1000, a chunk of 2048")
    assert "| 2303 rope_and_cache, 2048 decode_attention, 1024 prefill_attention | 17360 |" in mixed
    shared = cuda_costs.cost_of("64 decodes of 4352, 4096 of them in common")
    assert "| 64 rope_and_cache, 512 cascade_attention, 512 decode_attention | 3856 | 336 |" in shared
    by_itself = cuda_costs.cost_of("64 decodes of 4352, each by itself")
    assert "| 64 rope_and_cache, 2048 decode_attention | 9232 | 1141 |" in by_itself
    single = cuda_costs.cost_of("1 decode of 2048")
    assert "| 1 rope_and_cache, 64 decode_attention | 144 | 8 |" in single


def test_every_kernel_is_recorded_and_spills_are_few() -> None:
    known = cuda_costs.recorded()
    assert set(known) == {cuda_costs.short(name) for _, name in cuda_costs.kernels()}
    assert {len(cells) for cells in known.values()} == {len(cuda_costs.ARCHES)}
    spilled = {
        (name, arch)
        for name, cells in known.items()
        for arch, cell in zip(cuda_costs.ARCHES, cells, strict=True)
        if cell[1]
    }
    assert {arch for _, arch in spilled} <= {"sm_100", "sm_120"}
    assert not any("attention" in name for name, _ in spilled)
    assert len(spilled) <= 5


@pytest.mark.skipif(not nvrtc.available(), reason="needs cuda-bindings and nvidia-cuda-nvrtc")
def test_kernels_above_their_recorded_costs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small kernel instead of the whole comparison, which takes minutes."""
    norm = [kernel for kernel in cuda_costs.kernels() if kernel[1].startswith("rms_norm")]
    assert cuda_costs.compare(norm) == []
    ((name, cells),) = ((name, cells) for name, cells in cuda_costs.recorded().items() if name.startswith("rms_norm"))
    for less in ((3, 0, 0), (0, 1, 0), (0, 0, 1)):
        fewer = [tuple(now - taken for now, taken in zip(cell, less, strict=True)) for cell in cells]
        monkeypatch.setattr(cuda_costs, "recorded", lambda: {name: fewer})  # noqa: B023
        assert len(cuda_costs.compare(norm)) == len(cuda_costs.ARCHES)
