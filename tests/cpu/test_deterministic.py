"""`--deterministic`: a sequence has the same logits, bit for bit, in any batch, in any chunks and in recorded programs.

The truth is a sequence that is decoded alone, token after token.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.driver import Driver, make_prompt, new_request
from tests.plays import Recorder
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, linear
from vllm_lite.protocol.step import Continue, Entry, Finish

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the native library")

LENGTH, NUM_SEQUENCES = 110, 3
BLOCKS_OF_A_SEQUENCE = 7
ODD = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "llama, float16, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {"dtype": "float16"}),
    "qwen3 of odd sizes, bfloat16": ("qwen3", ODD, {"dtype": "bfloat16"}),
    "mistral with a window, bfloat16": ("mistral", {"sliding_window": 21}, {"dtype": "bfloat16"}),
    "int8": ("llama", {}, {"quantization": "int8", "dtype": "bfloat16"}),
    "float8 cache": ("llama", {}, {"kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16"}),
    "int8 cache": ("llama", {}, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
}


class Truth:
    """The tokens of one sequence alone, and the logits after each of them, from the prompt's last one on."""

    def __init__(self, model: Path, seed: int, **settings: Any) -> None:
        prompt = make_prompt(5, seed=seed)
        driver = Driver(model, **settings)
        recorder = Recorder(driver)
        driver.run(new_request(0, prompt, list(range(1, 1 + BLOCKS_OF_A_SEQUENCE))))
        driver.decode(0, count=LENGTH - len(prompt))
        self.tokens = prompt + driver.got[0]
        self.after = dict(enumerate((logits[0] for logits in recorder.logits), len(prompt)))
        """By the number of tokens before."""


class Mixed:
    """Sequences that begin with any number of a truth's tokens, computed together in random chunks."""

    def __init__(self, driver: Driver, truths: list[Truth], seed: int) -> None:
        self.driver, self.truths, self.random = driver, truths, Random(seed)
        self.recorder = Recorder(driver)
        self.of: dict[int, Truth] = {}
        self.tables = [list(range(first, first + BLOCKS_OF_A_SEQUENCE)) for first in range(1, 34, BLOCKS_OF_A_SEQUENCE)]
        self.owned: dict[int, list[int]] = {}
        self.num_compared = 0

    def step(self) -> None:
        entries: list[Entry] = []
        for handle in list(self.owned):
            if self.driver.lengths[handle] >= LENGTH:
                entries.append(Finish(handle))
                self.tables.append(self.owned.pop(handle))
            else:
                left = self.driver.lengths[handle] - self.driver.computed[handle]
                entries.append(Continue(handle, self.random.choice([1, left, self.random.randint(1, left)]), []))
        if self.tables and self.random.random() < 0.5:
            entries.append(self.arrival())
        self.run(self.random.sample(entries, len(entries)))

    def arrival(self) -> Entry:
        handle, truth = len(self.of), self.random.choice(self.truths)
        length = self.random.randint(5, LENGTH - 5)
        self.of[handle], self.owned[handle] = truth, self.tables.pop()
        blocks = list(self.owned[handle])
        return new_request(handle, truth.tokens[:length], blocks, num_tokens=self.random.randint(1, min(length, 25)))

    def run(self, entries: list[Entry]) -> None:
        before = {handle: list(tokens) for handle, tokens in self.driver.got.items()}
        self.driver.run(*entries)
        handles = [entry.handle for entry in entries if not isinstance(entry, Finish)]  # type: ignore[union-attr]
        handles = [handle for handle in handles if self.driver.got.get(handle, []) != before.get(handle, [])]
        for row, handle in enumerate(handles):
            length = self.driver.lengths[handle] - 1
            assert torch.equal(self.recorder.logits[-1][row], self.of[handle].after[length]), (handle, length)
            self.num_compared += 1


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same_alone_and_in_any_schedule(name: str, tmp_path: Path) -> None:
    family, overrides, settings = MODELS[name]
    model = make_checkpoint(tmp_path / "model", family, **overrides)
    settings = settings | {"deterministic": True}
    truths = [Truth(model, seed, **settings) for seed in range(NUM_SEQUENCES)]
    mixed = Mixed(Driver(model, **settings), truths, seed=5)
    for _ in range(150):
        mixed.step()
    assert mixed.num_compared > 100


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8"])
def test_a_product_is_the_same_for_any_number_of_rows(each_isa: str, kind: str) -> None:
    """Sizes that no tile divides; 97 rows take two tasks."""
    dtype = torch.bfloat16 if kind == "int8" else getattr(torch, kind)
    form: Quantization | None = "int8" if kind == "int8" else None
    weight = PackedWeight(torch.randn(77, 2307).to(dtype), torch.randn(77).to(dtype), form=form)
    x = torch.randn(200, 2307).to(dtype)
    whole = torch.empty(200, 77)
    linear(x, weight, whole)
    for first, count in [(3, 1), (0, 2), (5, 11), (7, 12), (1, 13), (50, 64), (90, 97), (0, 150)]:
        out = torch.empty(count, 77)
        linear(x[first : first + count], weight, out)
        assert torch.equal(out, whole[first : first + count]), count
