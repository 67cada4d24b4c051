"""`--attention-backend paged`: the kernels of vLLM's paper serve a model from client to KV cache, in the emulator."""

from typing import Any

import pytest

from tests.e2e.reference import GREEDY, Reference, compare, start
from tests.kernels import emulator
from vllm_lite.attention import select
from vllm_lite.attention.backend import AttentionShape
from vllm_lite.attention.paged import PagedBackend, split_layout_reason
from vllm_lite.errors import VllmLiteError

pytestmark = pytest.mark.skipif(emulator.available() is None, reason="no C++ compiler for the emulator")


class EmulatedBackend(PagedBackend):
    """The paged backend on a CPU, with kernels in the emulator of a GPU."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape, emulator.EmulatorLauncher())

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:
        return split_layout_reason(shape)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select.BACKENDS, "paged", f"{__name__}:{EmulatedBackend.__name__}")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_gpu_blocks_override": 14, "swap_space": 0.01, "preemption_mode": "swap", "max_num_batched_tokens": 64}],
    ids=["roomy", "blocks move"],
)
def test_greedy_tokens_match_transformers(references: dict[str, Reference], settings: dict[str, Any]) -> None:
    """Prompts in chunks, shared prefixes, decodes beside prompts; and blocks that are swapped out and in."""
    reference = references["qwen3"]
    cases = reference.cases[5:10]
    with start(reference.path, attention_backend="paged", **settings) as llm:
        outputs = llm.generate([case.prompt for case in cases], GREEDY)
        stats = llm.stats()
    assert compare(cases, outputs).wrong == []
    assert bool(stats.swapped_in_blocks) is bool(settings), stats


def test_a_cpu_has_no_such_kernels(references: dict[str, Reference]) -> None:
    with pytest.raises(VllmLiteError, match="paged: it runs on a CUDA device, not on cpu"):
        start(references["qwen3"].path, attention_backend="paged")
