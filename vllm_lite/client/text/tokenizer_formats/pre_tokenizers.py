"""The steps that cut a text into words before BPE merges within each word, for each `tokenizer.ggml.pre` of GGUF files.

The names are those of https://github.com/ggml-org/llama.cpp; many of them share their steps. The expressions are those
of the models' own tokenizer.json. Characters are composed (NFC) only for the families that say so.
"""

from typing import Any, NamedTuple

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AT_LINES, _SPACES = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_ASCII_SIGN_AND_LETTERS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_SIGN_WORDS = rf"{_ASCII_SIGN_AND_LETTERS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_TO_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_NOT_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_EAST_ASIA = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_CJK_RUNS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_AND_KANA}"
)
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of scripts that have capitals, as DeepSeek's first tokenizer lists them."""
_WIDE_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_THREES = r"(?=(\p{N}{3})+(?!\p{N}))"
"""Matches the empty text before each group of three digits; groups are counted from the last digit of a number."""


def _gpt4(digits: str, *, contractions: str = f"{_CONTRACTIONS}|", spaces: str = _SPACES) -> str:
    """GPT-4's expression. `digits` is the quantifier that says how many digits make one word."""
    return rf"{contractions}{_LETTERS}|\p{{N}}{digits}|{_SIGNS}[\r\n]*|{_AT_LINES}|{spaces}"


def _cased(digits: str, more: str, not_these: str = "") -> str:
    """GPT-4o's expression, which cuts before a capital. `more` matches endings that stay with a word."""
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{not_these}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{more}|{before}{upper}+{lower}*{more}"
    return rf"{words}|\p{{N}}{digits}|{_SIGNS}[\r\n/]*|{_AT_LINES}|{_SPACES}"


def _cut(expression: str) -> dict[str, Any]:
    """The step that makes a word of each match of `expression`, and of each text between two matches."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _signs(behavior: str) -> dict[str, Any]:
    return {"type": "Punctuation", "behavior": behavior}


_GPT2_CUTS = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
"""Every byte becomes a character of its own."""
_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2_BYTES = {**BYTES, "use_regex": True}
"""The step of BYTES that also splits words as GPT-2 does."""


class Words(NamedTuple):
    """Rules by which one family cuts texts into words."""

    steps: tuple[dict[str, Any], ...]
    """The steps of tokenizer.json's pre_tokenizer. Each step cuts every word that the step before it made."""
    whole_words: bool = False
    """Whether a word in the vocabulary becomes its token at once, without merges (ignore_merges)."""
    adds_bos: bool = False
    """Whether the BOS token is put before a text, for files that do not say so themselves."""
    nfc: bool = False
    are_bytes: bool = True
    """Whether each character of a token represents one byte; otherwise it is a character of the text."""
    spaces_are_pieces: bool = False
    """Whether a space is written as SentencePiece writes it."""


def _words(*expressions: str) -> Words:
    """Rules that cut a text by each expression in turn, and then write the words as bytes."""
    return Words((*(_cut(each) for each in expressions), BYTES))


_GPT2, _GPT2_SINGLE_DIGITS = Words((_GPT2_BYTES,)), Words((_DIGITS, _GPT2_BYTES))
_LLAMA3_PLAIN = _words(_gpt4("{1,3}"))
_LLAMA3 = _LLAMA3_PLAIN._replace(whole_words=True, adds_bos=True)
_QWEN2_PLAIN = _words(_gpt4(""))
_QWEN2 = _QWEN2_PLAIN._replace(nfc=True)
_GPT4O = _words(_cased("{1,3}", f"{_CONTRACTIONS}?"))
_TINY_AYA = _words(r"\d{1,3}(?=(?:\d{3})*\b)", _cased("{1,3}", f"{_CONTRACTIONS}?"))._replace(nfc=True)
_DEEPSEEK3 = _words(r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_SIGN_WORDS}[\r\n]*|{_AT_LINES}|{_SPACES}")
_PIECES = Words((), are_bytes=False, spaces_are_pieces=True)
_JAIS2_SPACES = "|".join([rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)] + [r"\s{1,2}(?!\S)", r"\s{1}"])
_ALIKE: tuple[tuple[str, Words], ...] = (
    ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum jina-v1-en jina-v2-code", _GPT2),
    ("roberta-bpe jais trillion granite-docling exaone4", _GPT2),
    ("mpt olmo modern-bert", _GPT2._replace(nfc=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _GPT2_SINGLE_DIGITS),
    ("command-r", _GPT2_SINGLE_DIGITS._replace(nfc=True)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("smaug-bpe dbrx chatglm-bpe", _LLAMA3_PLAIN),
    ("glm4 glm5", _LLAMA3_PLAIN._replace(whole_words=True)),
    ("jais-2", _words(_gpt4("{1,3}", spaces=_JAIS2_SPACES))),
    ("minicpm5", _words(r"\p{N}{1,3}", _gpt4("+"))._replace(whole_words=True)),
    ("qwen2 deepseek-r1-qwen f2llmv2 stablelm2", _QWEN2),
    ("kormo megrez hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe", _QWEN2_PLAIN),
    ("ufakzeka", _words(_gpt4("", contractions=""))),
    ("laguna", _words(r"[^\n]+|[\n]+", _gpt4(""))),
    ("seed-coder", _words(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_AT_LINES}|{_SPACES}")),
    ("tekken", _words(_cased("", ""))._replace(whole_words=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    ("granite-embed-multi-97m", _GPT4O._replace(whole_words=True)),
    ("tiny_aya cohere2moe", _TINY_AYA),
    ("youtu", _words(_CJK_RUNS, _cased("", f"{_CONTRACTIONS}?"))._replace(whole_words=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    ("spark2_5", _words(r"\p{N}{1,3}", _HAN_AND_KANA, rf"{_SIGN_WORDS}|[\r\n]|{_SPACES}", r"\p{N}")),
    ("afmoe", _words(r"\p{N}+", _THREES, _EAST_ASIA, rf"{_SIGN_WORDS}[\r\n]*|{_AT_LINES}|{_SPACES}")),
    ("superbpe", _words(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("bloom poro-chat gpt3-finnish", _words(_NOT_PUNCTUATION)),
    ("viking", Words((_cut(_NOT_PUNCTUATION), _DIGITS, BYTES))),
    ("gemma4 granite-embed-multi-311m", _PIECES._replace(adds_bos=True)),
    ("sarvam-moe", _PIECES),
    ("whitespace", Words(({"type": "WhitespaceSplit"},), are_bytes=False)),
)
"""Pairs of names, separated by spaces, and the rules that all of these share."""
WORDS: dict[str, Words] = {name: words for names, words in _ALIKE for name in names.split()} | {
    "qwen35": _words(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
        rf"{_AT_LINES}|{_SPACES}"
    )._replace(nfc=True),
    "exaone-moe": _words(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?|"
        rf"\s*[\r\n]|{_SPACES}"
    ),
    "kimi-k2": _words(
        r"\p{Han}+|" + _cased("{1,3}", f"{_CONTRACTIONS}?", r"&&[^\p{Han}]").replace(r"[\r\n/]*", r"[\r\n]*")
    ),
    "deepseek-llm": Words(
        (
            *map(_cut, (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_WIDE_SIGNS}]+", r"\s+$", _HAN_TO_HANGUL)),
            _DIGITS,
            BYTES,
        )
    ),
    "deepseek-coder": Words((*map(_cut, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL)), _DIGITS, BYTES)),
    "falcon": Words(
        (_signs("Contiguous"), _GPT2_BYTES, {"type": "Digits", "individual_digits": False}, _cut("[0-9][0-9][0-9]"))
    ),
    "chameleon": Words(
        (
            *map(_cut, ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )")),
            _DIGITS,
            _signs("Isolated"),
            _GPT2_BYTES,
        ),
        adds_bos=True,
    ),
    "default": _words(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_CUTS, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Name -> rules by which words are cut."""
UNNAMED = {
    "bloom": "bloom",
    "command-r": "command-r",
    "falcon": "falcon",
    "gpt2": "gpt-2",
    "gptneox": "mpt",
    "mpt": "mpt",
    "olmo": "olmo",
    "phi2": "phi-2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "refact": "refact",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}
"""Architecture -> name, for files without a name: converters did not write it before May 2024. All models of these
architectures use the same rules. Any other architecture gets the rules named "default"."""
