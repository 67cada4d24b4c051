"""FrequentWords: decides whether drafts are made of frequent words only, by the latest tokens.

If the LM head is a large part of what a draft reads, scoring only the most frequent eighth of the vocabulary makes
drafts much faster, but drafts are wrong if the right token is another one. The order of tokens in a tokenizer shows
which words are frequent, but not for every language. So the latest tokens of drafting sequences are checked, prompts
included: if one in ten or more is infrequent, all words are scored. Prompts count so that this is known before the
first draft: drafts that cannot be right would teach the engine that drafts do not pay.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vllm_lite.checkpoint.frequent_words import frequent_words
from vllm_lite.checkpoint.shard import SINGLE
from vllm_lite.layers.weights.embedding import LMHead
from vllm_lite.layers.weights.frequent_head import FrequentHead
from vllm_lite.layers.weights.weight_slot import WeightGroup
from vllm_lite.models.decoder import Decoder
from vllm_lite.models.weights import load_weights
from vllm_lite.worker.batch.step_inputs import Int32s
from vllm_lite.worker.drafting.place import DraftPlace
from vllm_lite.worker.forward import Forward
from vllm_lite.worker.graphs import DecodeGraphs

LATEST = 128
"""Latest tokens of a sequence that count."""
WEIGHTS = 0.97 ** np.arange(LATEST)[::-1]
"""Weight of each of them, the latest last: four infrequent tokens in a row reach MANY."""
MANY, FEW = 0.1, 0.05
"""Share of infrequent tokens from which all words are scored, and share below which only frequent ones are."""


class FrequentWords:
    """Switches the head of a drafting model, and its recorded passes."""

    def __init__(self, head: FrequentHead, forward: Forward) -> None:
        self._head, self._forward = head, forward
        self._is_frequent = np.zeros(head.embedding.vocabulary.total, np.bool_)
        for piece in head.words:
            self._is_frequent[piece.start : piece.stop] = True
        self.share = 0.0
        """The current weighted share of infrequent tokens."""
        self._score(all_of_them=False)

    @classmethod
    def of(cls, head: LMHead, forward: Forward) -> "FrequentWords | None":
        """None if the head cannot score frequent words separately."""
        return cls(head, forward) if isinstance(head, FrequentHead) else None

    def follow(self, tokens: Sequence[Int32s]) -> None:
        """Update `share` from the tokens of the sequences that draft, each [num_tokens]; switch the head if needed."""
        self.share = sum(map(self._rare, tokens)) / len(tokens)
        if self._head.is_whole and self.share < FEW:
            self._score(all_of_them=False)
        elif not self._head.is_whole and self.share >= MANY:
            self._score(all_of_them=True)

    def _rare(self, tokens: Int32s) -> float:
        """Weighted share of infrequent tokens among the latest of a sequence."""
        latest = tokens[-LATEST:]
        weights = WEIGHTS[-len(latest) :]
        return 1.0 - float(weights @ self._is_frequent[latest] / weights.sum())

    def _score(self, *, all_of_them: bool) -> None:
        self._head.is_whole = all_of_them
        if isinstance(self._forward, DecodeGraphs):
            self._forward.forget()


def add_frequent_head(drafter: Decoder, owner: Decoder, place: DraftPlace, folder: str, load_format: str) -> None:
    """Give `drafter` a 4-bit head for the frequent words of a large vocabulary, beside the head of `owner`, which then
    scores all words. It is read from `owner`'s checkpoint `folder`, as load_weights does. Nothing to do if there are
    several ranks, the checkpoint has quantized its head, or the tokenizer does not tell frequent words."""
    whole, config = owner.lm_head, place.config
    if owner.embedding.form.quantizes(owner.head_name) or owner.communicator.shard != SINGLE:
        return
    words = frequent_words(config.tokenizer, owner.spec.vocab_size, place.spec.eos_token_ids)
    if words:
        drafter.lm_head = head = FrequentHead(whole, words, whole=whole)
        only: Any = _HeadOnly(owner, head)
        load_weights(only, folder, load_format, config.seed, place.loaded)


class _HeadOnly:
    """A model of whose checkpoint only the head is loaded."""

    def __init__(self, owner: Decoder, head: FrequentHead) -> None:
        self.spec, self._name, self._head = owner.spec, owner.head_name, head

    def weight_groups(self) -> Iterator[WeightGroup]:
        yield self._head.group(self._name)

    def ignores(self, name: str) -> bool:  # noqa: ARG002 (the loader's)
        """The other tensors have been loaded."""
        return True
