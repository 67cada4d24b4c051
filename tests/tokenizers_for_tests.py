"""Small tokenizers of every kind that checkpoints have, built here, as the bytes of a tokenizer.json."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "▁the", "▁cat", "▁sat", "s", "▁", "▁▁", "a", "▁a", ".", "▁.", "é", "▁été", "猫", "🙂", "▁x▁y"]
SPECIALS = ["<s>", "</s>", "<unk>"]


def _bytes_of(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


def byte_level(*, nfc: bool = False) -> bytes:
    """Llama 3, GPT-2 and Qwen (`nfc`): a byte alphabet, a few merges, special and ordinary added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("ðŁĻ", "Ĥ")]
    vocab = {letter: place for place, letter in enumerate(letters)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("two words", normalized=False), AddedToken("日本", normalized=False)])
    return _bytes_of(tokenizer)


def byte_fallback(*, strip: int = 1, bos: bool = True) -> bytes:
    """Llama 2 and Mistral (which strip one space from a text), Gemma (none): SentencePiece as BPE with byte tokens."""
    names = [*SPECIALS, *(f"<0x{value:02X}>" for value in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    tokenizer.add_special_tokens(SPECIALS)
    return _bytes_of(tokenizer)


def byte_fallback_added() -> bytes:
    """Gemma and Phi-3: no BOS, ordinary tokens beside the vocabulary, some of which take spaces around them along."""
    tokenizer = Tokenizer.from_str(byte_fallback(strip=0, bos=False).decode())
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("▁▁▁", normalized=False)])
    tokenizer.add_tokens([AddedToken("été", normalized=True), AddedToken("<0xE2>x", normalized=False, rstrip=True)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("<turn>", lstrip=True)])
    return _bytes_of(tokenizer)


def byte_level_added() -> bytes:
    """Byte level, with added tokens that are spelled in letters of its alphabet of bytes."""
    tokenizer = Tokenizer.from_str(byte_level().decode())
    tokenizer.add_tokens([AddedToken("é", normalized=False), AddedToken("Ġx", normalized=False), "<é猫>"])
    tokenizer.add_special_tokens([AddedToken("<|é|>", rstrip=True)])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return _bytes_of(tokenizer)


def metaspace(prepend: str = "always") -> bytes:
    """T5 and XLM-R: the decoder drops the space before the first token."""
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in [*SPECIALS, *WORDS]], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend)
    tokenizer.add_special_tokens(SPECIALS)
    return _bytes_of(tokenizer)


def metaspace_bytes() -> bytes:
    """Byte tokens in front of a Metaspace decoder, so that the bytes of U+2581 are a space as well."""
    names = [*SPECIALS, *(f"<0x{value:02X}>" for value in range(256)), *WORDS]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(SPECIALS)
    return _bytes_of(tokenizer)


def word_piece() -> bytes:
    names = [*SPECIALS, "the", "cat", "##s", "##.", ".", ",", "n't", "##é"]
    tokenizer = Tokenizer(models.WordPiece({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIALS)
    return _bytes_of(tokenizer)


def no_decoder() -> bytes:
    names = [*SPECIALS, "the", "cat", "sat", "é"]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIALS)
    return _bytes_of(tokenizer)


def suffixes() -> bytes:
    """The decoder of the first GPT, whose text depends on the last token."""
    tokenizer = Tokenizer(models.BPE(vocab={"a</w>": 0, "b": 1}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return _bytes_of(tokenizer)


KINDS = {
    "byte level": byte_level,
    "byte level, NFC": lambda: byte_level(nfc=True),
    "byte fallback, stripped": byte_fallback,
    "byte fallback": lambda: byte_fallback(strip=0, bos=False),
    "byte fallback, added tokens": byte_fallback_added,
    "byte level, added tokens": byte_level_added,
    "byte fallback, two stripped": lambda: byte_fallback(strip=2),
    "metaspace": metaspace,
    "metaspace, never": lambda: metaspace("never"),
    "metaspace with bytes": metaspace_bytes,
    "word piece": word_piece,
    "no decoder": no_decoder,
}
