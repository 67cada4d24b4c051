"""The table of what steps cost the host: that the work is counted, whatever the time."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import cuda_costs


def test_a_row_of_each_kind() -> None:
    mixed = cuda_costs.cost_of("255 decodes of 1000, a chunk of 2048")
    assert "| 2303 rope_and_cache, 2048 decode_attention, 1024 prefill_attention | 17360 |" in mixed
    shared = cuda_costs.cost_of("64 decodes of 4352, 4096 of them in common")
    assert "| 64 rope_and_cache, 512 cascade_attention, 512 decode_attention | 3856 | 336 |" in shared
    by_itself = cuda_costs.cost_of("64 decodes of 4352, each by itself")
    assert "| 64 rope_and_cache, 2048 decode_attention | 9232 | 1141 |" in by_itself
    single = cuda_costs.cost_of("1 decode of 2048")
    assert "| 1 rope_and_cache, 64 decode_attention | 144 | 8 |" in single
