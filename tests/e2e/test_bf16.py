"""In bfloat16, position by position: the engine's token is that of transformers, except where rounding decides it.

Both get the same tokens, so that one difference does not cause others. Rounding may decide a token if the best two
float32 logits differ by less than twice the largest change of a logit by bfloat16 in transformers itself.
"""

from dataclasses import dataclass

import pytest
import torch

from tests.e2e.reference import GREEDY, NUM_TOKENS, Reference, first_difference, make_reference, start
from vllm_lite import SamplingParams

MIN_SHARE = 0.5
"""Minimum share of positions that are compared."""
MAX_EXCESS = 1.15
"""Bar of our logprobs' average distance to float32, as a multiple of transformers'."""


@dataclass(frozen=True)
class Forced:
    """A prompt, its float32 continuation, and the logits of both types for each of that continuation's tokens."""

    prompt: list[int]
    tokens: list[int]
    exact: torch.Tensor  # float32 [NUM_TOKENS, vocab]
    rounded: torch.Tensor  # bfloat16's, as float32 [NUM_TOKENS, vocab]

    @property
    def decided(self) -> torch.Tensor:  # bool [NUM_TOKENS]
        """Mask of positions where the best token wins by more than rounding can take away."""
        best = self.exact.topk(2).values
        return best[:, 0] - best[:, 1] > 2 * (self.rounded - self.exact).abs().amax(1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request, tmp_path_factory) -> Reference:
    """A checkpoint in bfloat16, computed in float32: the weights are the same numbers."""
    return make_reference(tmp_path_factory.mktemp("bf16"), request.param, dtype="bfloat16")


@pytest.fixture(scope="module")
def forced(checkpoint) -> list[Forced]:
    rounded = Reference(checkpoint.path, dtype="bfloat16")
    return [
        Forced(case.prompt, case.tokens, case.logits, rounded.logits(case.prompt, case.tokens))
        for case in checkpoint.cases
    ]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def llm(checkpoint, request):
    settings = {"max_num_batched_tokens": 256, "tensor_parallel_size": request.param}
    with start(checkpoint.path, **settings) as llm:
        assert llm.config.dtype == "bfloat16", "the checkpoint's own"
        yield llm


def test_every_position_given_the_same_tokens(llm, forced):
    """A request for one token at every third position, with other positions in each prompt. The prefix is mostly
    cached."""
    places = [(index, at) for index in range(len(forced)) for at in range(index % 3, NUM_TOKENS, 3)]
    prompts = [forced[index].prompt + forced[index].tokens[:at] for index, at in places]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=1)
    completions = [output.outputs[0] for output in llm.generate(prompts, one, use_tqdm=False)]
    ours = torch.tensor([completion.token_ids[0] for completion in completions])
    logprobs = torch.tensor([completion.logprobs[0][completion.token_ids[0]].logprob for completion in completions])
    exact = torch.stack([forced[index].exact[at] for index, at in places])
    rounded = torch.stack([forced[index].rounded[at] for index, at in places])
    decided = torch.stack([forced[index].decided[at] for index, at in places])
    share = decided.float().mean().item()
    errors = [(given.log_softmax(-1).gather(1, ours[:, None])[:, 0]) for given in (exact, rounded)]
    our_error, their_error = (logprobs - errors[0]).abs().mean().item(), (errors[1] - errors[0]).abs().mean().item()
    print(
        f"{share:.1%} of {len(prompts)} positions compared, {(ours == rounded.argmax(1)).float().mean():.1%} of all "
        f"equal; mean error of logprobs {our_error:.4f}, of transformers {their_error:.4f}"
    )
    assert torch.equal(ours[decided], rounded.argmax(1)[decided])
    assert torch.equal(ours[decided], exact.argmax(1)[decided])
    assert share > MIN_SHARE
    assert our_error < MAX_EXCESS * their_error


def test_generated_tokens_until_rounding_decides_one(llm, forced):
    """The same by decoding: our tokens part from the float32 ones only where they may."""
    outputs = llm.generate([case.prompt for case in forced], GREEDY, use_tqdm=False)
    num_compared = 0
    for case, output in zip(forced, outputs, strict=True):
        at = first_difference(case.tokens, output.outputs[0].token_ids)
        num_compared += NUM_TOKENS if at is None else at
        assert at is None or not case.decided[at]
    print(f"{num_compared} of {len(forced) * NUM_TOKENS} tokens before the first difference of each prompt")
    assert num_compared > len(forced) * NUM_TOKENS / 4
