"""Recurrent layers' prompts in chunks on CUDA: through the emulator, and which launches a step has."""

from collections.abc import Sequence

import pytest
import torch

from tests.kernels import recurrent_chunks_cases as cases
from tests.kernels.emulator import EmulatorLauncher
from tests.kernels.fused_cases import Case
from tests.kernels.recurrent_cases import launched, segments
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels.cuda.launcher import Arg, Kernel

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases.CASES])
def test_case(case: Case, emulated: EmulatorLauncher) -> None:
    case(emulated, CPU)


@pytest.mark.parametrize("name", ["delta_chunks_saved", "mamba_chunks_rows"])
def test_the_order_of_threads_does_not_show(name: str, emulated: EmulatorLauncher) -> None:
    for order_seed in (1, 2):
        dict(cases.CASES)[name](EmulatorLauncher(order_seed), CPU)


class Named:
    """Names the kernels that are launched; launches nothing."""

    multiprocessor_bytes = 228 * 1024

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[int, int, int], int]] = []

    def kernel(self, source: str, name: str) -> Kernel:  # noqa: ARG002
        def launch(
            grid: tuple[int, int, int],
            block: tuple[int, int, int],
            args: Sequence[Arg],
            shared_bytes: int = 0,
        ) -> None:
            self.launched.append((name.partition("<")[0], block, shared_bytes))

        return launch


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
    launcher = Named()
    layer.run(launched(spec, launcher), of, CPU)
    assert [name for name, *_ in launcher.launched][2:] == ([chunks[0]] if chunks else [])
    assert chunks is None or launcher.launched[2] == chunks
