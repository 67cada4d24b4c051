"""The logprobs of a prompt, as they come in."""

from collections.abc import Sequence

from vllm_lite.client.outputs import Logprob
from vllm_lite.client.sample import candidates
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import PromptLogprobs, TokenLogprobs


class PromptScores:
    """They are kept as they came until somebody looks: a long prompt has many, and who takes them in serves others."""

    def __init__(self, tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._came: list[TokenLogprobs] = []
        self._entries: list[dict[int, Logprob] | None] = [None]

    @property
    def entries(self) -> list[dict[int, Logprob] | None]:
        """`entries[i]` maps token ids to candidates for prompt token i; None for the first one. Safe in any thread."""
        entries = self._entries
        if len(entries) <= len(self._came):
            place = len(entries)
            new = zip(self._token_ids[place:], self._came[place - 1 :], strict=False)
            entries = self._entries = entries + [candidates(self._tokenizer, *item) for item in new]
        return entries

    @property
    def complete(self) -> bool:
        return len(self._came) + 1 == len(self._token_ids)

    def take(self, scores: PromptLogprobs) -> None:
        """The next ones; what is known already may come again."""
        new = scores.entries[max(0, len(self._came) + 1 - scores.start) :]
        self._came += new[: len(self._token_ids) - 1 - len(self._came)]
