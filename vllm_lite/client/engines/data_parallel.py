"""DataParallelSession: one session with several engines that serve the same model, with the interface of Session.

PrefixRouter chooses the engine of each request. When an engine dies, its requests continue in the others, after the
tokens that were delivered. An engine whose workers die keeps its requests: it finds the one that kills workers, which
other engines would have to find again.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from operator import is_not
from typing import Any, TypeVar

import msgspec

from vllm_lite.client.engines.any_session import AnySession, Member
from vllm_lite.client.engines.cached_blocks import CachedBlocks, endpoints
from vllm_lite.client.engines.feature import copy_of
from vllm_lite.client.engines.joined_answers import gathered, joined
from vllm_lite.client.engines.routing import MAX_HASHED_BLOCKS, PrefixRouter
from vllm_lite.client.engines.session import Session
from vllm_lite.client.streams.open_stream import OpenStream, Sink
from vllm_lite.client.streams.stream import StreamFailure
from vllm_lite.config import ResolvedConfig
from vllm_lite.errors import EngineError, RequestError
from vllm_lite.protocol.adapters import AdapterInfo
from vllm_lite.protocol.api import Descriptions, ForkRequest, FromClient, Generate, PrefixCacheReset, Welcome
from vllm_lite.protocol.operations import OperationDone
from vllm_lite.runtime import log
from vllm_lite.runtime.prefix_hash import PrefixHasher

MAX_SEEN = 1024
"""Maximum requests of other clients whose engine is remembered."""

A = TypeVar("A")
logger = log.get(__name__)


class DataParallelSession(AnySession):
    """All methods may be called from any thread. Lock order: this session's lock, then a member's."""

    def __init__(
        self, members: Sequence[Session], prefix_hash_seed: str | None, sources: Sequence[str] = (), topic: str = ""
    ) -> None:
        """`members` have one engine each, and are closed with this session. The engines share `prefix_hash_seed`, and
        publish KV events at `sources`, if any."""
        self.members = tuple(members)
        self.address = members[0].address
        self._hasher = PrefixHasher(members[0].welcome.block_size, prefix_hash_seed)
        self._router = PrefixRouter[int]()
        for index, member in enumerate(members):
            self._router.add(index, member.welcome.num_blocks)
        self._seen: OrderedDict[str, int] = OrderedDict()
        """Request id -> engine, of requests of any client that describe() has shown."""
        self._lock = threading.RLock()  # reentrant: a member may notice its loss inside a call
        self._closing = False
        self._adapters: tuple[list[dict[str, AdapterInfo]], dict[str, AdapterInfo]] = [], {}
        """(lists of adapters per engine, adapters common to all), cached until a list changes."""
        self._blocks = CachedBlocks(sources, topic, self._router, self._lock) if sources else None
        for member in members:
            member.on_change = self._on_change

    @property
    def welcome(self) -> Welcome:
        shortest = min(member.welcome.max_model_len for member in self.members)
        return msgspec.structs.replace(self.members[0].welcome, max_model_len=shortest)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The LoRA adapters that all engines have, so that any request can name them."""
        reachable = [member.adapters for member in self.members if member.has_engine] or [self.members[0].adapters]
        seen, common = self._adapters
        if len(seen) != len(reachable) or any(map(is_not, seen, reachable)):
            common = {name: info for name, info in reachable[0].items() if all(name in each for each in reachable)}
            self._adapters = reachable, common
        return common

    @property
    def num_engines(self) -> int:
        return len(self.members)

    @property
    def dead(self) -> EngineError | None:
        """The error of the last engine, once all have ended."""
        ends = [member.dead for member in self.members]
        return ends[-1] if all(ends) else None

    @property
    def recovering(self) -> str | None:
        """Reason why streams pause, if no engine serves at present."""
        pauses = [member.recovering for member in self.members if member.dead is None]
        return pauses[0] if pauses and all(pauses) else None

    def submit(
        self, message: Generate | ForkRequest, sink: Sink, own: Generate | None = None, affinity: str | None = None
    ) -> None:
        """See Session.submit(). Requests with the same `affinity`, by default their cache salt, go to one engine."""
        with self._lock:
            request_id = message.child_id if isinstance(message, ForkRequest) else message.request_id
            if self.is_live(request_id):
                raise RequestError(f"request id {request_id!r} is in use; choose another")
            index = self._engine_of(message.request_id)  # of a fork's parent, or of a request to attach to
            if index is None:
                request = message if isinstance(message, Generate) else own
                index = self.choose(request, affinity)
            self.members[index].submit(message, sink, own)

    def is_live(self, request_id: str) -> bool:
        return any(member.is_live(request_id) for member in self.members)

    def abort(self, request_id: str, samples: Sequence[int] = (), *, stopped: bool = False) -> None:
        with self._lock:
            for member in self.members:
                member.abort(request_id, samples, stopped=stopped)

    def drop(self, request_id: str, *, stopped: bool = False) -> None:
        with self._lock:
            for member in self.members:
                member.drop(request_id, stopped=stopped)

    def ask(self, message: FromClient, answer: type[A]) -> "Future[A]":
        """Send a query to every engine that answers at present, and join the answers. An operation needs all engines,
        since one that is being replaced would keep its old weights, or not pause: then EngineError is raised.
        """
        needs_all = answer is OperationDone
        absent = [member for member in self.members if member.dead is None and not member.has_engine]
        if needs_all and absent:
            raise EngineError(
                f"the engine at {absent[0].address} is being replaced ({absent[0].recovering}), and all must do this; "
                "nothing was done, ask again"
            )
        if answer in (PrefixCacheReset, OperationDone):  # other weights have other KV
            with self._lock:
                for index in range(len(self.members)):
                    self._router.cleared(index)
        asked: list[Future[A]] = []
        error: EngineError | None = None
        for index, member in enumerate(self.members):
            try:
                asked.append(member.ask(message, answer))
            except EngineError as refusal:
                if needs_all and member.dead is None:
                    raise
                error = refusal
            else:
                asked[-1].add_done_callback(partial(self._see, index))
        if not asked and error is not None:
            raise error
        return gathered(asked, joined, needs_all=needs_all)

    def ask_one(self, number: int, message: FromClient, answer: type[A]) -> "Future[A]":
        return self.members[number].ask(message, answer)

    def ask_each(self, first_block: int | None = None) -> list[Member]:
        asked = []
        for number, member in enumerate(self.members):
            with suppress(EngineError):  # an engine that is being replaced does not answer
                asked.append(member.asked_as(number, first_block))
        return asked

    def close(self) -> None:
        with self._lock:
            self._closing = True
        if self._blocks is not None:
            self._blocks.close()
        for member in self.members:
            member.close()

    # ---- inside

    def _see(self, index: int, done: "Future[Any]") -> None:
        """Remember the engine of the requests that it has described."""
        described = None if done.cancelled() or done.exception() is not None else done.result()
        if not isinstance(described, Descriptions):
            return
        with self._lock:
            for request in described.requests:
                self._seen[request.request_id] = index
                self._seen.move_to_end(request.request_id)
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)

    def _engine_of(self, request_id: str) -> int | None:
        """The engine of a request, if it is known: this client's, or another client's that describe() has shown."""
        own = (index for index, member in enumerate(self.members) if member.is_live(request_id))
        index = next(own, self._seen.get(request_id))
        return index if index is not None and self.members[index].has_engine else None

    def choose(self, request: Generate | None, affinity: str | None = None) -> int:
        """Choose the engine of a new request, and record the prompt as cached there. Raises EngineError if all are
        dead."""
        chosen, hashes = self._choice(request, affinity)
        self._router.stored(chosen, hashes)
        return chosen

    def engine_for(self, request: Generate, affinity: str | None = None) -> int:
        with self._lock:
            return self._choice(request, affinity)[0]

    def _choice(self, request: Generate | None, affinity: str | None) -> tuple[int, list[bytes]]:
        """The engine for a new request, and the hashes of its prompt. Raises EngineError if all are dead."""
        alive = [index for index, member in enumerate(self.members) if member.dead is None]
        if not alive:
            raise self.dead or EngineError("all engines are dead")
        reachable = [index for index in alive if self.members[index].has_engine] or alive
        serving = [index for index in reachable if self.members[index].recovering is None] or reachable
        loads = {index: self.members[index].num_open for index in serving}
        salt = None if request is None else request.params.cache_salt
        hashes = [] if request is None else prompt_hashes(self._hasher, request)
        return self._router.choose(hashes, loads, affinity or salt).engine, hashes

    def _on_change(self, changed: Session) -> None:
        """Handle the loss or the return of an engine."""
        with self._lock:
            if changed.recovering is not None or changed.dead is not None:
                self._router.cleared(self.members.index(changed))
            if self._closing or not any(member.has_engine for member in self.members):
                return
            for member in self.members:
                moved = member.release()
                for request_id, stream in moved.items():
                    self._move(request_id, stream)
                if moved:
                    logger.warning("%d requests of the engine at %s continue in others", len(moved), member.address)

    def _move(self, request_id: str, stream: OpenStream) -> None:
        """Continue a stream without an engine in another one. If all have ended, the stream ends."""
        while True:
            try:
                self.members[self.choose(stream.request)].adopt(request_id, stream)
            except EngineError as error:  # the chosen engine has ended as well
                if self.dead is None:
                    continue
                with suppress(Exception):  # its reader has gone
                    stream.sink([StreamFailure(request_id, copy_of(error))])
            return


def prompt_hashes(hasher: PrefixHasher, request: Generate) -> list[bytes]:
    """Hash the first MAX_HASHED_BLOCKS full blocks of a prompt as the engine does."""
    salt, block_bytes = request.params.cache_salt, 4 * hasher.block_size
    tokens = memoryview(request.prompt)[: MAX_HASHED_BLOCKS * block_bytes]
    hashes: list[bytes] = []
    own = ("lora", request.adapter) if request.adapter else ()
    root = hasher.root(own if salt is None else (*own, salt))
    hasher.extend(hashes, root, tokens, len(tokens) // 4, request.media)
    return hashes


def connect(addresses: Sequence[str], config: ResolvedConfig) -> Session | DataParallelSession:
    """Connect to the one or several engines that were launched with `config`. Raises EngineError."""
    heartbeat_s, recovery_s = config.heartbeat_timeout_s, config.recovery_timeout_s
    with ExitStack() as opened:
        sessions = [
            opened.enter_context(
                closing(Session.connect(address, heartbeat_timeout_s=heartbeat_s, recovery_timeout_s=recovery_s))
            )
            for address in addresses
        ]
        opened.pop_all()
    return sessions[0] if len(sessions) == 1 else joined_sessions(sessions, config)


def joined_sessions(sessions: Sequence[Session], config: ResolvedConfig) -> DataParallelSession:
    """Join sessions with several engines into one; `config` is that of the first engine."""
    events, sources = config.kv_events_config, endpoints(config, [session.address for session in sessions])
    return DataParallelSession(sessions, config.prefix_hash_seed, sources, "" if events is None else events.topic)
