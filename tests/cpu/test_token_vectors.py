"""Vectors and positions that a step part gives to the model instead of those of the tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.driver import Driver, make_prompt, new_request
from vllm_lite.attention.step_batch import TokenVectors
from vllm_lite.models.decoder import Decoder
from vllm_lite.protocol.step import Continue, Finish
from vllm_lite.worker.batch.part import StepPart
from vllm_lite.worker.batch.step_inputs import StepInputs
from vllm_lite.worker.worker import Worker

PLACEHOLDER = 0


class Vectors(StepPart):
    """Gives each placeholder the vector of the text's token at its place."""

    def __init__(self, model: Decoder, text: list[int]) -> None:
        self.model = model
        self.text = text

    def build(self, inputs: StepInputs) -> None:
        rows = np.flatnonzero(inputs.input_ids == PLACEHOLDER)
        if len(rows):
            tokens = torch.tensor([self.text[place] for place in inputs.positions[rows]])
            vectors = torch.empty(len(rows), self.model.spec.hidden_size)
            self.model.embedding.forward(tokens, out=vectors)
            inputs.vectors = TokenVectors(torch.from_numpy(rows), vectors * self.model.embedding_scale)


class Shifted(StepPart):
    """Counts positions from 100."""

    def build(self, inputs: StepInputs) -> None:
        inputs.positions, inputs.counts_otherwise = inputs.positions + 100, True


def with_part(monkeypatch: pytest.MonkeyPatch, make: Any, checkpoint: Path, **settings: Any) -> Driver:
    parts = Worker._parts
    monkeypatch.setattr(Worker, "_parts", lambda worker, forward: [*parts(worker, forward), make(forward.model)])
    driver = Driver(checkpoint, **settings)
    monkeypatch.undo()
    return driver


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [30, 7, 1])
def test_vectors_in_a_prompt_act_like_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, chunk: int
) -> None:
    """A prompt of placeholders with the vectors of a text continues like that text, bit for bit."""
    checkpoint = make_checkpoint(tmp_path / model_type, model_type=model_type)
    text = make_prompt(30, seed=5)
    prompt = [*text[:4], *[PLACEHOLDER] * 12, *text[16:]]

    def run(driver: Driver, tokens: list[int]) -> list[int]:
        driver.run(new_request(0, tokens, [1, 2, 3], num_tokens=chunk))
        for start in range(chunk, 30, chunk):
            driver.run(Continue(0, min(chunk, 30 - start), []))
        driver.decode(0, count=10)
        driver.run(Finish(0))
        return driver.got.pop(0)

    driver = with_part(monkeypatch, lambda model: Vectors(model, text), checkpoint)
    expected = run(driver, text)
    assert len(set(expected)) > 4, "a sequence that repeats itself proves nothing"
    assert run(driver, prompt) == expected
    assert run(Driver(checkpoint), prompt) != expected


def test_positions_are_the_models_and_places_those_of_the_cache(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary positions matter by their differences alone, so a constant changes no token if all steps have it."""
    prompt, drivers = make_prompt(20, seed=3), [Driver(tiny_checkpoint)]
    drivers.append(with_part(monkeypatch, lambda _model: Shifted(), tiny_checkpoint))
    seen = list[list[int]]()
    batch = drivers[1].worker.runner.batch
    build = batch.build

    def recorded() -> StepInputs:
        inputs = build()
        seen.append(inputs.positions.tolist())
        return inputs

    monkeypatch.setattr(batch, "build", recorded)
    for driver in drivers:
        driver.run(new_request(0, prompt, [1, 2, 3]))
        driver.decode(0, count=12)
    assert drivers[0].got == drivers[1].got
    assert seen[-1] == [131], "decode steps count as the prompt did"
