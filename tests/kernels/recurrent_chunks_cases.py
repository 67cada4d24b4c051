"""Cases of the kernels that compute prompts of recurrent layers in chunks, as named functions of a launcher and a
device, without pytest. The reference computes token by token, in plain torch."""

import torch

from tests.kernels.cases import Case
from tests.kernels.recurrent_cases import Layer, delta_layer, launched, mamba_layer, segments
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.mamba import MambaSpec
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.delta_rule import DeltaNetOp, DeltaNetWeights, Projected
from vllm_lite.kernels.mamba import MambaInputs, MambaOp, MambaWeights
from vllm_lite.kernels.recurrent import Segments

SLOW = 0.02
"""Factor of decays. It is so small that a chunk still depends on the state before it."""

ALONE = segments([0, 1], [0, 150], [0], [3])
EDGE = segments([0, 2], [0, 128, 128], [2, 3], [3, 4])
"""Two whole chunks that continue a state, which is copied at the end."""
SAVED = segments([0, 4], [0, 16, 80, 144, 150], [0, 5, 6, 7], [5, 6, 7, 0])
"""A prompt whose state is saved after 16, 80 and 144 tokens, at ends of blocks, and discarded at its end."""
MIXED = segments([0, 1, 2, 4, 5, 6], [0, 1, 64, 80, 129, 130, 194], [1, 2, 4, 8, 0, 0], [1, 9, 8, 4, 0, 5])
"""A decode, 63 rows that are computed token by token, a prompt of 65 rows that continues a state and saves one after 16
rows, padding, and a prompt of 64 rows."""


class DeltaByToken(DeltaNetOp):
    """The formula, a token at a time."""

    def scan(self, own: Projected, weights: DeltaNetWeights, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for row in zip(*(part.split(1) for part in own), strict=True):
            out, state = super().scan(Projected(*row), weights, state)
            outs.append(out)
        return torch.cat(outs), state


class MambaByToken(MambaOp):
    """The formula, a token at a time."""

    def scan(self, own: MambaInputs, weights: MambaWeights, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outs = []
        for row in zip(*(part.split(1) for part in own), strict=True):
            out, state = super().scan(MambaInputs(*row), weights, state)
            outs.append(out)
        return torch.cat(outs), state


def layer_of(
    spec: DeltaNetSpec | MambaSpec, dtype: torch.dtype, num_rows: int, slow: float
) -> tuple[Layer, DeltaNetOp | MambaOp]:
    """A layer, and the operation that computes it token by token."""
    op: DeltaNetOp | MambaOp
    if isinstance(spec, DeltaNetSpec):
        layer, op = delta_layer(spec, dtype, num_rows), DeltaByToken(spec)
    else:
        layer, op = mamba_layer(spec, dtype, num_rows), MambaByToken(spec)
    return layer._replace(weights=layer.weights._replace(decay=layer.weights.decay * slow)), op


def like_tokens(
    spec: DeltaNetSpec | MambaSpec, of: Segments, dtype: torch.dtype = torch.float32, slow: float = SLOW
) -> Case:
    """Values differ from the reference by at most 1e-4 of the largest if operands are split into two bfloat16, and by
    at most 1e-2 if they are one bfloat16."""

    def run(launcher: Launcher, device: torch.device) -> None:
        layer, by_token = layer_of(spec, dtype, int(of.rows[-1]), slow)
        wanted, wanted_states = layer.run(by_token, of, torch.device("cpu"))
        out, states = layer.run(launched(spec, launcher), of, device)
        within = 1e-4 if dtype is torch.float32 else 1e-2
        for found, right in ((out, wanted), (states, wanted_states)):
            worst, most = (found - right).abs().max(), right.abs().max()
            assert worst <= within * most, f"{worst} of {most}"

    return run


def own_rows_only(spec: DeltaNetSpec | MambaSpec) -> Case:
    """A prompt's bits do not depend on the other sequences, and a decode's bits not on whether others are computed in
    chunks."""

    def run(launcher: Launcher, device: torch.device) -> None:
        layer = layer_of(spec, torch.float32, int(MIXED.rows[-1]), SLOW)[0]
        out, states = layer.run(launched(spec, launcher), MIXED, device)
        for firsts, first, rows, sources, targets in (
            ([0, 1], 0, [0, 1], [1], [1]),
            ([0, 2], 64, [0, 16, 65], [4, 8], [8, 4]),
        ):
            own = layer._replace(projected=layer.projected[first : first + rows[-1]])
            alone, alone_states = own.run(launched(spec, launcher), segments(firsts, rows, sources, targets), device)
            assert torch.equal(alone, out[first : first + rows[-1]])
            for target in targets:
                assert torch.equal(alone_states[target], states[target])

    return run


SPECS: dict[str, DeltaNetSpec | MambaSpec] = {
    "delta": DeltaNetSpec(1, 3, 24, 20, 3),
    "delta_small": DeltaNetSpec(2, 4, 7, 37, 2),
    "mamba": MambaSpec(2, 41, 23, 3, (0.1, 0.8)),
    "mamba_groups": MambaSpec(4, 20, 24, 3, num_groups=2),
}
LARGE: dict[str, DeltaNetSpec | MambaSpec] = {
    "delta_large": DeltaNetSpec(1, 1, 128, 128, 4),
    "mamba_large": MambaSpec(1, 64, 256, 4),
}
CASES: list[tuple[str, Case]] = [
    *((f"{name}_chunks_mixed", like_tokens(spec, MIXED)) for name, spec in SPECS.items()),
    *((f"{name}_chunks_saved", like_tokens(SPECS[name], SAVED)) for name in ("delta", "mamba")),
    *((f"{name}_chunks_alone", like_tokens(SPECS[name], ALONE, torch.bfloat16)) for name in ("delta", "mamba")),
    *((f"{name}_chunks_edge", like_tokens(spec, EDGE, torch.bfloat16)) for name, spec in LARGE.items()),
    ("delta_large_chunks_edge_float", like_tokens(LARGE["delta_large"], EDGE)),
    *((f"{name}_chunks_fast", like_tokens(SPECS[name], ALONE, slow=50.0)) for name in ("delta", "mamba")),
    *((f"{name}_chunks_half", like_tokens(SPECS[name], MIXED, torch.float16)) for name in ("delta", "mamba")),
    *((f"{name}_chunks_rows", own_rows_only(SPECS[name])) for name in ("delta", "mamba")),
]
