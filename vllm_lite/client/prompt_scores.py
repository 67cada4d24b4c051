"""The logprobs of a prompt, as they come in."""

from collections.abc import Sequence

from vllm_lite.client.outputs import Logprob
from vllm_lite.client.sample import candidates
from vllm_lite.client.tokenizer import Tokenizer
from vllm_lite.protocol.api import PromptLogprobs


class PromptScores:
    """`entries[i]` maps token ids to candidates for prompt token i; None for the first one."""

    def __init__(self, tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> None:
        self.entries: list[dict[int, Logprob] | None] = [None]
        self._tokenizer = tokenizer
        self._token_ids = token_ids

    @property
    def complete(self) -> bool:
        return len(self.entries) == len(self._token_ids)

    def take(self, scores: PromptLogprobs) -> None:
        """The next ones; what is known already may come again."""
        new = scores.entries[max(0, len(self.entries) - scores.start) :]
        tokens = self._token_ids[len(self.entries) :]
        self.entries += [candidates(self._tokenizer, *item) for item in zip(tokens, new, strict=False)]
