"""The tokens that end an answer: the union of those named by a checkpoint's files, vocabulary and template.

Each source alone is often wrong: chat models trained from a base model often keep <|endoftext|> in config.json and have
<|im_end|> in tokenizer_config.json, and most GGUF files name one id. A model with an unknown end token continues until
max_tokens, so each of these sources counts:

the files                config.json and generation_config.json, or the named ids of a GGUF file
the tokenizer            its eos_token
the vocabulary           special tokens whose spelling is known to end a text; with a chat template, or a message
the chat template        the token after an assistant's text
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_lite.checkpoint.config_json import end_ids_by_file
from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.client.text.templates.closing_token import Closing, find_closing, may_write
from vllm_lite.client.text.templates.template_source import TemplateSource, special_tokens
from vllm_lite.client.text.tokenizer_formats import conversion
from vllm_lite.errors import ModelError
from vllm_lite.runtime.untrusted_files import MAX_TOKENIZER_BYTES, read_bounded

TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end any text, including that of models without chats."""
SURE_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|assistant_end|>", "<end_of_utterance>"),
)
"""Special tokens that end a message of a chat, in all templates that write them."""
UNSURE_ENDS = ("<|end|>", "<|eom_id|>", "<|eom|>", "<|return|>", "<|call|>", "<EOT>", "<|EOT|>", "[EOT]")
"""Special tokens that end a message in some templates, and occur within messages in others."""
HARMONY, CHANNEL_END = frozenset({"<|return|>", "<|call|>"}), "<|end|>"
"""In a vocabulary with both HARMONY tokens, `<|end|>` closes a part of an answer, and another part follows."""
EOS_TOKEN, VOCABULARY, TEMPLATE = "the tokenizer's eos_token", "the vocabulary", "the chat template"


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _File(msgspec.Struct):
    """The parts of a tokenizer.json that spell tokens. Its vocabulary is decoded only on demand, which is rare."""

    added_tokens: list[_Added] = []
    model: _Model = msgspec.field(default_factory=_Model)

    def id_of(self, text: str) -> int | None:
        for each in self.added_tokens:
            if each.content == text:
                return each.id
        vocabulary: Any = msgspec.json.decode(self.model.vocab)
        found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
        return found if type(found) is int else None


def writes_text(spec: ModelSpec) -> bool:
    """Whether the model generates answers, not only embeddings and scores."""
    return spec.encoder is None and (spec.pooling is None or spec.pooling.generates)


class EndTokens(NamedTuple):
    """The tokens that end an answer. `named`: the ids in the model's vocabulary that each source names; `texts`: their
    spellings, if known."""

    named: Mapping[str, tuple[int, ...]]
    texts: Mapping[int, str]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(token for ids in self.named.values() for token in ids))

    def described(self, ids: Iterable[int]) -> str:
        """Format `ids` with their spellings: 2 <|im_end|>, 7."""
        return ", ".join(f"{token} {self.texts[token]}" if token in self.texts else str(token) for token in ids)

    def lines(self) -> list[str]:
        """Format each token with the sources that name it."""
        by_token = {token: [name for name, ids in self.named.items() if token in ids] for token in self.ids}
        return [f"{self.described([token])} ({', '.join(names)})" for token, names in by_token.items()]

    @property
    def problem(self) -> str | None:
        """Describe the contradiction in one sentence: groups of sources without a common token, or no token at all."""
        if not self.ids:
            return "no file, no vocabulary and no template names a token that ends an answer: max_tokens alone does"
        (one, ids), *rest = [item for item in self.named.items() if item[0] != VOCABULARY] or [("", ())]
        joined, apart = set(ids), dict(rest)
        while near := [name for name, others in apart.items() if joined.intersection(others)]:
            joined.update(*(apart.pop(name) for name in near))
        if not apart:
            return None
        other, others = next(iter(apart.items()))
        return (
            f"{one} and {other} disagree about the token that ends an answer, {self.described(ids)} or "
            f"{self.described(others)}: each of them does"
        )


def find_end_tokens(
    path: str | Path,
    tokenizer: str | Path,
    spec: ModelSpec,
    template: str | Path | None = None,
    *,
    renders: bool = False,
) -> EndTokens:
    """Find the end tokens of the model at `path`, with the tokenizer in the folder `tokenizer` and the chat template
    `template`, or its own.

    With `renders` the template is always rendered, otherwise only if it may close a message by a token that no other
    source names. Raises ModelError for a damaged file.
    """
    named = end_ids_by_file(path, spec)
    file, tokens = _read(tokenizer), special_tokens(tokenizer)
    source = TemplateSource.load(tokenizer, template)
    texts = {each.id: each.content for each in file.added_tokens}
    eos = tokens.get("eos_token")
    if eos is not None and (token := file.id_of(eos)) is not None:
        named[EOS_TOKEN] = (token,)
        texts.setdefault(token, eos)
    special = {each.content: each.id for each in file.added_tokens if each.special}
    inner = frozenset({CHANNEL_END} if special.keys() >= HARMONY else ())
    spelled = frozenset(TEXT_ENDS if source is None else TEXT_ENDS + SURE_ENDS + UNSURE_ENDS).intersection(special)
    closing = Closing()
    if source is not None:
        in_files = frozenset(texts[token] for ids in named.values() for token in ids if token in texts)
        others = frozenset(texts.values()) - inner - {tokens.get("bos_token", "")} | in_files
        closing = _closing(source, in_files, spelled - inner, others, renders=renders)
        inner |= closing.inner
    named[VOCABULARY] = tuple(special[text] for text in sorted(spelled - inner, key=special.__getitem__))
    named[TEMPLATE] = tuple(token for token, text in texts.items() if text == closing.token)
    known = {name: tuple(token for token in ids if 0 <= token < spec.vocab_size) for name, ids in named.items()}
    return EndTokens({name: ids for name, ids in known.items() if ids}, texts)


def _closing(
    source: TemplateSource, in_files: frozenset[str], spelled: frozenset[str], tokens: frozenset[str], *, renders: bool
) -> Closing:
    """Find the one of `tokens` that closes messages in a template. The template is rendered if `renders` is set; or if
    it spells no token that surely closes messages or that files name, but may write one; or if tokens that are known
    only by their spelling (`spelled`) may occur within messages."""
    sure_ends = [*SURE_ENDS, *in_files.intersection(UNSURE_ENDS)]
    sure = next((text for text in sure_ends if text in in_files | spelled and text in source.texts), None)
    is_open = (spelled - in_files).intersection(UNSURE_ENDS) or (sure is None and may_write(source, tokens - in_files))
    if not renders and not is_open:
        return Closing(sure)
    found = find_closing(source, tokens, in_files | spelled)
    return Closing(sure if found.token is None else found.token, found.inner.difference(sure_ends))


def _read(tokenizer: str | Path) -> _File:
    """Read the tokenizer.json in `tokenizer`, or one converted from another format; empty if there is none. Raises
    ModelError."""
    if not conversion.has_tokenizer(tokenizer):
        return _File()
    file = conversion.folder_of(tokenizer) / conversion.TOKENIZER_FILE
    try:
        return msgspec.json.decode(read_bounded(file, MAX_TOKENIZER_BYTES), type=_File)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
