"""Several parts of a step together: rows that move, chunks, and answers that belong to one step only."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.checkpoints import make_checkpoint
from tests.cpu.test_drafter_halves import OnDevice, generate
from tests.cpu.test_pooling import PoolingWorker
from tests.driver import GREEDY, Driver, make_prompt, new_request
from vllm_lite.protocol.params import LogitRules
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.step import Continue
from vllm_lite.worker.batch.step_inputs import padding_step
from vllm_lite.worker.sampling.drafter import GrammarDrafter


def test_each_part_reads_the_rows_that_it_asked_for() -> None:
    inputs = padding_step(12, 3, 1, 16, num_sampling=2)
    first, second = inputs.read(np.array([1, 2, 3])), inputs.read(np.array([7]))
    assert inputs.wanted is not None
    assert inputs.wanted.tolist() == [*inputs.sample_tokens.tolist(), 1, 2, 3, 7]
    assert inputs.wanted[inputs.read_rows(first)].tolist() == [1, 2, 3]
    assert inputs.wanted[inputs.read_rows(second)].tolist() == [7]


def test_a_prompt_in_chunks_is_scored_once(tiny_checkpoint: Path) -> None:
    prompt, driver = make_prompt(9, seed=4), Driver(tiny_checkpoint)
    scored = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    chunks: list[Any] = [
        new_request(0, prompt, [1], num_tokens=4, sampling=scored),
        Continue(0, 3, []),
        Continue(0, 2, []),
    ]
    got = [driver.run(entry).prompts for entry in [*chunks, Continue(0, 1, []), Continue(0, 1, [])]]
    found = [(part.start, len(part.entries)) for prompts in got for _, part in prompts or ()]
    assert found == [(1, 4), (5, 3), (8, 1)]
    assert got[3:] == [None, None]


def test_steps_of_tokens_follow_a_step_that_pools(tmp_path: Path) -> None:
    """In a worker that generates and pools, a step's output has no results of earlier steps."""
    worker = PoolingWorker(make_checkpoint(tmp_path / "both"), convert="embed")
    prompt = make_prompt(6, seed=2)
    both = worker.new(0, prompt, Pooling("embed")), new_request(1, prompt, [70])
    output = worker.run(*both)
    assert (output.counts, len(output.pooled or ())) == ([0, 1], 1)
    for _ in range(3):
        output = worker.run(Continue(1, 1, []))
        assert (output.counts, output.pooled, len(output.tokens)) == (None, None, 4)


def test_bad_words_see_drafts_that_were_on_the_device(tiny_checkpoint: Path) -> None:
    """A draft ends a bad word's beginning, so the token after it is ruled out."""
    driver = Driver(tiny_checkpoint)
    prompt = make_prompt(30, seed=11)
    generate(driver, None, GREEDY)
    plain = list(driver.got[0])
    ruled = msgspec.structs.replace(GREEDY, rules=LogitRules(bad_words=((plain[5], plain[6]),)))
    generate(driver, None, ruled)
    expected = list(driver.got[0])
    assert expected[:6] == plain[:6]
    assert expected[6] != plain[6]
    generate(driver, GrammarDrafter(OnDevice([*prompt, *plain, 0, 0, 0, 0])), ruled)
    assert driver.got[0][:20] == expected[:20]
