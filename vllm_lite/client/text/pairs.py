"""Two texts as one prompt, for models that score how well a document answers a query."""

from vllm_lite.client.text.tokenizer import Tokenizer

Pair = tuple[str, str]
"""A query and a document."""
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Text after every pair, with which Qwen3-Reranker was trained."""


def encode_pair(tokenizer: Tokenizer, pair: Pair, num_kept: int | None) -> tuple[list[int], int]:
    """Token ids of a pair, by the tokenizer's own rule for two texts; and the index at which the second begins, if the
    model has token types, else 0."""
    ids, types = tokenizer.encode_pair(*pair, num_kept=num_kept)
    return ids, types.index(1) if 1 in types else 0


def reranker_prompt(
    tokenizer: Tokenizer, pair: Pair, num_kept: int | None, instruction: str | None = None
) -> list[int]:
    """Token ids of a pair for Qwen3-Reranker, whose answer is yes or no. If necessary the end of the pair is truncated,
    never the text around it."""
    query, document = pair
    middle = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    before, inner, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, middle, _BEHIND))
    if num_kept is not None:
        inner = inner[: max(0, num_kept - len(before) - len(behind))]
    return [*before, *inner, *behind]
