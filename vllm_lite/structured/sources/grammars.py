"""Grammars: makes the mask source of each sequence, from grammars that it compiles in threads.

Callers get a future and never wait. Equal grammars are compiled once; each sequence gets a copy of the matcher, which
takes a microsecond. The vocabulary is loaded in the same threads, for the first grammar, as it takes a second for
150,000 tokens, by which it would delay the start.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from vllm_lite.errors import GrammarError, VllmLiteError
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.structured import Thinking
from vllm_lite.runtime import log
from vllm_lite.structured.sources.matcher import GrammarSource, compile_matcher
from vllm_lite.structured.sources.source import MaskSource
from vllm_lite.structured.sources.thinking import ThinkingSource
from vllm_lite.structured.sources.vocabulary import Vocabulary

NUM_THREADS = 2
MAX_CACHED = 32
MAX_CACHED_BYTES = 4 << 20
"""Maximum bytes of the texts of cached grammars; compiled ones take a multiple."""

Wanted = Future[MaskSource]

logger = log.get(__name__)


class Grammars:
    """Makes mask sources. All methods are thread-safe and never wait."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        """`load_vocabulary` is called once, in a thread, for the first grammar. If it raises, every grammar fails with
        its error."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._load_vocabulary = load_vocabulary
        self._loading: Future[Vocabulary] | None = None
        self._lock = threading.Lock()
        self._cached: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()  # by digest: matcher and bytes of text
        self._cached_bytes = 0
        self._asked: dict[bytes, list[weakref.ref[_Request]]] = {}  # by digest, until it is compiled

    def source_of(self, sampling: Sampling) -> MaskSource | Wanted | None:
        """Make the mask source of a sequence; a future of it if there is a grammar, None if it needs no masks.

        The future raises GrammarError or ModelError. A grammar whose futures have all been dropped before its
        compilation starts is not compiled.
        """
        rules = sampling.rules
        if rules is None or not (rules.grammar or rules.thinking is not None):
            return None
        if not rules.grammar:
            return None if rules.thinking is None else ThinkingSource(rules.thinking, None, frozenset())
        return self._compiled(rules.grammar, rules.thinking)

    def _compiled(self, grammar: str, thinking: Thinking | None) -> Wanted:
        text = grammar.encode()
        digest = blake2b(text, digest_size=16).digest()
        request = _Request(thinking)
        with self._lock:
            vocabulary = self._vocabulary()
            if (known := self._cached.get(digest)) is not None:
                self._cached.move_to_end(digest)
            elif (asked := self._asked.get(digest)) is not None:
                asked.append(weakref.ref(request))
            else:
                self._asked[digest] = [weakref.ref(request)]
                self._pool.submit(self._compile, digest, grammar, len(text), vocabulary)
        if known is not None:
            request.fulfil(known[0], vocabulary.result())
        return request

    def _vocabulary(self) -> Future[Vocabulary]:
        """Future of the vocabulary. Called with the lock held."""
        if self._loading is None:
            self._loading = self._pool.submit(self._load_vocabulary)
            self._loading.add_done_callback(_report)
        return self._loading

    def _compile(self, digest: bytes, grammar: str, num_bytes: int, loading: Future[Vocabulary]) -> None:
        with self._lock:
            if not any(each() is not None for each in self._asked[digest]):
                del self._asked[digest]
                return
        matcher, vocabulary, failure = None, None, None
        try:
            vocabulary = loading.result()
            matcher = compile_matcher(grammar, vocabulary)
        except VllmLiteError as error:
            failure = error
        except Exception as error:  # any error must fail only this request
            logger.exception("compiling a grammar")
            failure = GrammarError(f"the grammar cannot be compiled: {error}")
        with self._lock:
            requests = [request for each in self._asked.pop(digest) if (request := each()) is not None]
            if matcher is not None:
                self._keep(digest, matcher, num_bytes)
        for request in requests:
            if matcher is not None and vocabulary is not None:
                request.fulfil(matcher, vocabulary)
            else:
                request.set_exception(failure)

    def _keep(self, digest: bytes, matcher: Any, num_bytes: int) -> None:
        self._cached[digest] = matcher, num_bytes
        self._cached_bytes += num_bytes
        while len(self._cached) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            _, (_, freed) = self._cached.popitem(last=False)
            self._cached_bytes -= freed

    def close(self) -> None:
        """Stop compiling, without waiting for compilations in progress."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Request(Wanted):
    """A future of one sequence's mask source."""

    def __init__(self, thinking: Thinking | None) -> None:
        super().__init__()
        self._thinking = thinking

    def fulfil(self, matcher: Any, vocabulary: Vocabulary) -> None:
        """Set the result: a source with its own copy of the matcher."""
        source: MaskSource = GrammarSource(matcher.deep_copy(), vocabulary)
        if self._thinking is not None:
            source = ThinkingSource(self._thinking, source, vocabulary.eos_ids)
        self.set_result(source)


def _report(vocabulary: Future[Vocabulary]) -> None:
    if not vocabulary.cancelled() and (error := vocabulary.exception()) is not None:
        logger.info("requests with a grammar will fail: %s", error)
