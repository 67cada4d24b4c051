"""Labels as tokens: the first token of a reply that is one of a question's labels."""

from collections.abc import Iterable, Sequence

from vllm_lite.client.decisions.questions import Question
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import RequestError

ENDING_CHARS = 256
"""Characters at a prompt's end that are searched for its last added token."""

LabelIds = tuple[tuple[int, ...], ...]
"""Token ids of each option of a question: of all spellings of its label that are one token."""


def label_ids(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], questions: Sequence[Question]
) -> list[LabelIds]:
    """Find the tokens of the labels of `questions`, whose prompts all end like `text`, tokenized to `token_ids`.

    Raises RequestError for a label that is not one token there, or has the same token as another option.
    """
    ending, ending_ids = _ending(tokenizer, text, token_ids)
    space = "" if text[-1:].isspace() or any(text.endswith(each) for each in tokenizer.added_tokens if each) else " "
    known: dict[str, int | None] = {}
    found = []
    for question in questions:
        for spelling in (spelling for label in question.labels for spelling in label):
            if spelling not in known:
                ids = tokenizer.encode(ending + space + spelling, add_special_tokens=False)
                known[spelling] = ids[-1] if ids[:-1] == ending_ids else None
        options = tuple(_ids_of(label, known) for label in question.labels)
        for label, known_ids in zip(question.labels, options, strict=True):
            if not known_ids:
                raise RequestError(
                    f"question {question.id!r}: {label[0]!r} is not one token after this model's prompt, so this "
                    f"model cannot answer a {question.kind}; try another one"
                )
        if len({token_id for each in options for token_id in each}) < sum(map(len, options)):
            raise RequestError(f"question {question.id!r}: two options have the same token after this model's prompt")
        found.append(options)
    return found


def _ids_of(label: Sequence[str], known: dict[str, int | None]) -> tuple[int, ...]:
    """Distinct tokens of a label; none if its first spelling, which the prompt names, is not one token."""
    ids = [known[spelling] for spelling in label]
    return () if ids[0] is None else tuple(dict.fromkeys(each for each in ids if each is not None))


def _ending(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return an end of a prompt and its tokens: a short one if it has the same tokens alone, else the whole prompt."""
    for start in _starts(tokenizer.added_tokens, text):
        ids = tokenizer.encode(text[start:], add_special_tokens=False)
        if ids and list(token_ids[-len(ids) :]) == ids:
            return text[start:], ids
    raise RequestError("the model's tokenizer makes other tokens of the same prompt")


def _starts(added: Iterable[str], text: str) -> list[int]:
    """Positions to try as the beginning of an end: the last added token, the last line, the whole text."""
    end = text[-ENDING_CHARS:]
    places = [end.rfind(each) for each in added if each]
    offset = len(text) - len(end)
    found = [offset + max(places, default=-1)] if max(places, default=-1) >= 0 else []
    line = text.rfind("\n", offset, len(text) - 1)
    return [*found, *([line] if line >= 0 else []), 0]
