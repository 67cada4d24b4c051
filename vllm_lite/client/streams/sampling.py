"""Prepares sampling params for the engine: draws a seed, tokenizes bad words, compiles grammars."""

import os
from collections.abc import Callable
from functools import lru_cache

import msgspec

from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import MAX_BAD_WORD_TOKENS, RequestOutputKind, SamplingParams
from vllm_lite.protocol.structured import Thinking
from vllm_lite.runtime import log

logger = log.get(__name__)


def with_seed(params: SamplingParams) -> SamplingParams:
    """Draw a seed if the user gave none, so that a request that is sent again repeats its tokens."""
    if params.seed is not None or params.greedy:
        return params
    return msgspec.structs.replace(params, seed=int.from_bytes(os.urandom(8), "little"))


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Replace each bad word by its token ids, both as a text begins with it and as it follows a space.

    Raises RequestError.
    """
    known = list(params.bad_words_token_ids)
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(tokens) > MAX_BAD_WORD_TOKENS:
                raise RequestError(f"bad_words have at most {MAX_BAD_WORD_TOKENS} tokens each, got {len(tokens)}")
            if tokens:
                known.append(tokens)
    try:
        return params.clone(bad_words=(), bad_words_token_ids=tuple(dict.fromkeys(known)))
    except ValueError as error:
        raise RequestError(f"bad_words: {error}") from error


def with_form(
    params: SamplingParams, tokenizer: Tokenizer | None, thinking: Callable[[], Thinking | None]
) -> SamplingParams:
    """Replace structured_outputs by a grammar, and thinking_token_budget by a Thinking.

    `thinking` returns the Thinking of this request's output, if the format of the model's thinking is known; a grammar
    then applies after its end. A large schema takes up to a second. Raises RequestError.
    """
    wanted, budget = params.structured_outputs, params.thinking_token_budget
    if wanted is None and budget is None and params.grammar is None:
        return params
    if tokenizer is None and budget is None:
        raise RequestError("structured_outputs need a tokenizer, and this model has none")
    found = params.thinking or thinking()
    if budget is not None:
        if found is None:
            raise RequestError(
                "thinking_token_budget needs a model whose format of thinking is known, and an output that may think"
            )
        found = msgspec.structs.replace(found, budget=budget)
    grammar = params.grammar if wanted is None else check_form(params)
    return params.clone(structured_outputs=None, thinking_token_budget=None, grammar=grammar, thinking=found)


def check_form(params: SamplingParams) -> str:
    """Compile the grammar of `params`, or return a cached one. Raises RequestError."""
    from vllm_lite.structured.compile import compile_form  # llguidance is loaded when it is needed

    if params.structured_outputs is None:
        raise RequestError("structured_outputs is None, which has no grammar")
    grammar, notes = compile_form(params.structured_outputs)
    for note in notes:
        _warn_once(note)
    return grammar


@lru_cache(256)
def _warn_once(note: str) -> None:
    logger.warning("structured_outputs: not held at %s", note)


def wire_params(params: SamplingParams) -> SamplingParams:
    """The params for the engine, which draws `best_of` samples with logprobs; the client ranks them."""
    if params.output_kind is not RequestOutputKind.CUMULATIVE or params.extra_args is not None:
        params = params.clone(output_kind=RequestOutputKind.CUMULATIVE, extra_args=None)
    if params.best_of is None:
        return params
    if params.best_of == params.n:
        return msgspec.structs.replace(params, best_of=None)
    return msgspec.structs.replace(params, n=params.best_of, best_of=None, logprobs=params.logprobs or 0)
