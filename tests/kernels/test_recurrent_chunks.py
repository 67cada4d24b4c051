"""Recurrent layers' prompts in chunks on CUDA: through the emulator, and which launches a step has."""

import pytest
import torch

from tests.kernels import recurrent_chunks_cases as cases
from tests.kernels.cases import Recorder
from tests.kernels.recurrent_cases import launched, segments
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("spec", "rows", "num_seqs", "dtype", "chunks"),
    [
        (cases.LARGE["delta_large"], 64, 1, torch.bfloat16, ("delta_rule_chunks", (256, 1, 1), 61_440)),
        (cases.LARGE["mamba_large"], 200, 1, torch.bfloat16, ("mamba_chunks", (128, 1, 1), 77_824)),
        (cases.LARGE["mamba_large"], 200, 1, torch.float32, None),
        (cases.LARGE["delta_large"], 63, 1, torch.bfloat16, None),
        (cases.LARGE["delta_large"], 126, 64, torch.bfloat16, None),
        (cases.LARGE["delta_large"], 127, 64, torch.bfloat16, ("delta_rule_chunks", (256, 1, 1), 61_440)),
    ],
)
def test_only_long_prompts_are_computed_in_chunks(
    spec: DeltaNetSpec | MambaSpec,
    rows: int,
    num_seqs: int,
    dtype: torch.dtype,
    chunks: tuple[str, tuple[int, int, int], int] | None,
) -> None:
    """Only where a sequence may have many rows: a step of decodes has no launch that does nothing."""
    layer = cases.layer_of(spec, dtype, rows, 1.0)[0]
    bounds = [*range(num_seqs), rows]
    of = segments([*range(num_seqs + 1)], bounds, [0] * num_seqs, [0] * num_seqs)
    launcher = Recorder()
    layer.run(launched(spec, launcher), of, CPU)
    made = [(launch.name, launch.block, launch.shared_bytes) for launch in launcher.launches[2:]]
    assert made == ([chunks] if chunks else [])
