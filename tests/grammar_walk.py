"""Random walks over the masks of a grammar: outputs that a random model could write under it."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from vllm_lite.config import demo_folder
from vllm_lite.structured.limits import parser_limits

DEMO_TOKENIZER = Path(demo_folder()) / "tokenizer.json"
EOS = 0
CLOSING = frozenset(text.encode() for text in "\"'}]<\n")


@cache
def tokenizer_with(added: tuple[str, ...]) -> LLTokenizer:
    described = json.loads(DEMO_TOKENIZER.read_text())
    taken = [*described["model"]["vocab"].values(), *(token["id"] for token in described["added_tokens"])]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"] += [
        {"id": max(taken) + 1 + i, "content": text, "special": True, **flags} for i, text in enumerate(added)
    ]
    return LLTokenizer(json.dumps(described), eos_token=[EOS])


@cache
def pieces_with(added: tuple[str, ...]) -> list[bytes]:
    """The bytes of each token."""
    tokenizer = tokenizer_with(added)
    own = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size - len(added))]
    return [*own, *(text.encode() for text in added)]


@dataclass(frozen=True)
class Walker:
    """Walks with the tokenizer of the demo model, to which `added` texts are added as tokens."""

    added: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> LLTokenizer:
        return tokenizer_with(self.added)

    @property
    def added_tokens(self) -> Mapping[str, int]:
        first = self.tokenizer.vocab_size - len(self.added)
        return {text: first + i for i, text in enumerate(self.added)}

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def walk(self, grammar: str, rng: random.Random, most: int = 300) -> tuple[str, bool]:
        """Write a random text of the grammar; returns it, and whether it is complete. Prefers to end early, so that
        most walks are complete."""
        matcher, tokens = self.matcher(grammar), list[int]()
        while len(tokens) < most and not matcher.is_stopped():
            allowed = self.allowed(matcher)
            assert allowed, f"nothing is allowed behind {self.text(tokens)!r}: {matcher.get_error()}"
            if EOS in allowed and rng.random() < 0.3:
                return self.text(tokens), True
            pieces = pieces_with(self.added)
            closing = [token for token in allowed if pieces[token][:1] in CLOSING] if rng.random() < 0.4 else []
            token = rng.choice(closing or allowed)
            if token == EOS:
                return self.text(tokens), True
            tokens.append(token)
            assert matcher.consume_token(token), matcher.get_error()
        return self.text(tokens), matcher.is_accepting()

    def allowed(self, matcher: LLMatcher) -> list[int]:
        bits = f"{int.from_bytes(matcher.compute_bitmask(), 'little'):b}"[::-1]
        return [token for token, bit in enumerate(bits[: self.tokenizer.vocab_size]) if bit == "1"]

    def takes(self, grammar: str, text: str) -> bool:
        """Whether `text` is a whole output under the grammar; texts of added tokens in it are these tokens."""
        matcher = self.matcher(grammar)
        tokens = self.tokenizer.tokenize_str(text, parse_special=True)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    def text(self, tokens: list[int]) -> str:
        pieces = pieces_with(self.added)
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")  # a walk may stop inside a letter
