"""How texts are cut into words before BPE merges within them: what `tokenizer.ggml.pre` of a GGUF file is the name of.

https://github.com/ggml-org/llama.cpp gave the names. The expressions are those of the models' own tokenizer.json.
"""

from typing import Any, NamedTuple

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{more}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{more}}|"
    rf"\p{{N}}{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)


def _gpt4(digits: str) -> str:
    return _GPT4.replace("{digits}", digits)


def _cased(digits: str, more: str) -> str:
    return _CASED.replace("{digits}", digits).replace("{more}", more)


class Words(NamedTuple):
    """Expressions by which a text is cut one after another; then come the bytes."""

    cuts: tuple[str, ...] = ()
    gpt2: bool = False
    """Whether the bytes are cut as GPT-2 does."""
    single_digits: bool = False
    whole_words: bool = False
    """Whether a word that the vocabulary has is not merged of its parts (ignore_merges)."""
    adds_bos: bool = False
    """Where the file does not say it."""
    nfc: bool = False

    def steps(self) -> list[dict[str, Any]]:
        """The steps of tokenizer.json's pre_tokenizer."""
        digits = [{"type": "Digits", "individual_digits": True}] if self.single_digits else []
        cuts = [
            {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in self.cuts
        ]
        return [*digits, *cuts, {**BYTES, "use_regex": self.gpt2}]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
"""Every byte becomes a character of its own."""
_GPT2, _DIGITS = Words(gpt2=True), Words(gpt2=True, single_digits=True)
_LLAMA3 = Words((_gpt4("{1,3}"),), whole_words=True, adds_bos=True)
_QWEN2 = Words((_gpt4(""),), nfc=True)
_TEKKEN = Words((_cased("", ""),), whole_words=True, adds_bos=True)
_GPT4O = Words((_cased("{1,3}", f"{_CONTRACTIONS}?"),))
WORDS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2._replace(nfc=True),
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "codeshell": _DIGITS,
    "command-r": _DIGITS._replace(nfc=True),
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": Words((_gpt4("{1,3}"),)),
    "chatglm-bpe": Words((_gpt4("{1,3}"),)),
    "glm4": Words((_gpt4("{1,3}"),)),
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Words((_QWEN35,), nfc=True),
    "deepseek-v3": Words((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    "tekken": _TEKKEN,
    "pixtral": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
"""Name -> how words are cut."""
