"""ClientPort: the engine's side of the client wire: connected clients, their unsent outputs, and disconnections.

Tokens within GATHER_S of the client's previous message wait and are sent together, since every message takes time from
the cores that compute. First tokens and ends do not wait. For a slow reader, later tokens are merged into its next
message; past a deadline its requests are aborted. A client has gone when a send cannot reach it, of outputs or of the
heartbeat for clients with requests.
"""

import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from vllm_lite import transport
from vllm_lite.errors import ProtocolError
from vllm_lite.protocol import PROTOCOL_VERSION, api
from vllm_lite.protocol.adapters import AdapterInfo, AdapterList
from vllm_lite.protocol.codec import client_to_engine, engine_to_client, request_named_in
from vllm_lite.runtime import log
from vllm_lite.transport import Delivery, Tcp
from vllm_lite.transport.interface import Pollable

HEARTBEAT_S = 0.5
GATHER_S = 0.004
SLOW_READER_S = 30.0
MAX_PASS_MESSAGES = 64
MAX_PASS_S = 0.001
"""Limits of one pass of the loop, which delays all clients' tokens: messages read, and seconds. The transport reads one
message of each client in turn, so a client that sends many delays only itself."""
MAX_REFUSAL_S = 1.0
"""Seconds for reading the messages of clients that came while the engine failed to start."""
MAX_OWED = 1 << 16
"""Maximum unsent outputs of a client that does not read. Above it the client counts as gone."""
MIN_CHECKED = 64
"""Minimum number of clients before idle ones are checked for disconnection."""

logger = log.get(__name__)


class Outbox:
    """Unsent outputs of one client, merged per sample."""

    __slots__ = ("busy_since_s", "ended", "open", "sent_s", "urgent")

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.urgent = False
        self.ended: list[api.Tokens | api.Finished] = []
        self.open: dict[tuple[str, int], api.Tokens | api.Finished] = {}
        self.busy_since_s: float | None = None

    def add(self, output: api.Tokens | api.Finished) -> None:
        """Merge `output` with the unsent output of the same sample. The end of an earlier request with the same id is
        kept apart."""
        sample = output.request_id, output.index
        self.urgent = self.urgent or not output.start or isinstance(output, api.Finished)
        earlier = self.open.get(sample)
        if isinstance(earlier, api.Finished):
            self.ended.append(earlier)
            earlier = None
        self.open[sample] = output if earlier is None else _merge(earlier, output)

    def take(self) -> list[api.Tokens | api.Finished]:
        """All unsent outputs; those of one sample are in order."""
        return self.ended + list(self.open.values())

    def drop(self, count: int) -> None:
        """Remove the first `count` outputs of take(), which have been sent."""
        for sample in list(self.open)[: max(0, count - len(self.ended))]:
            del self.open[sample]
        self.ended = self.ended[count:]

    def sent(self, now_s: float) -> None:
        """Remove all outputs, which have been sent."""
        self.ended, self.open = [], {}
        self.urgent, self.sent_s, self.busy_since_s = False, now_s, None

    def may_wait(self, now_s: float) -> bool:
        """Whether to hold the outputs back and send them together with later ones."""
        return not self.urgent and now_s - self.sent_s < GATHER_S

    def __len__(self) -> int:
        return len(self.open) + len(self.ended)


class ClientPort:
    """The connections of one engine to its clients."""

    def __init__(
        self, address: str, epoch: int, tcp: Tcp | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.listener = transport.bind(address, tcp)
        self._clock = clock
        self.malformed = 0
        self._epoch = epoch
        self._welcome: api.Welcome | None = None
        self._recovering: api.Recovering | None = None
        self._early: dict[bytes, api.Hello] = {}
        self.clients: dict[bytes, Outbox] = {}
        self._next_heartbeat_s = 0.0
        self._next_check = MIN_CHECKED

    def open(self, welcome: api.Welcome) -> None:
        """Start to serve: answer the clients that sent Hello while the engine was starting."""
        self._welcome = welcome
        early, self._early = self._early, {}
        for peer, hello in early.items():
            self._greet(peer, hello)

    def receive(
        self, max_messages: int = MAX_PASS_MESSAGES, max_s: float = MAX_PASS_S
    ) -> Iterator[tuple[bytes, api.FromClient]]:
        """Yield the messages of one pass of the loop, from clients that have completed the handshake; more may be left.
        Handshakes and malformed messages are handled here, and count towards the limits."""
        until_s = self._clock() + max_s
        for number in range(max_messages):
            if number and self._clock() >= until_s:
                return
            item = self.listener.recv()
            if item is None:
                return
            peer, payload = item
            try:
                message = client_to_engine.decode(payload)
            except ProtocolError as error:
                self.malformed += 1
                if self.malformed & (self.malformed - 1) == 0:  # 1, 2, 4, 8, ...: clients must not fill the disk
                    logger.warning("dropped from a client (%d so far): %s", self.malformed, error)
                request_id = request_named_in(payload)
                if request_id is not None:
                    self.push(peer, api.Finished(request_id, 0, [], "error", error=str(error)))
                continue
            if isinstance(message, api.Hello):
                self._greet(peer, message)
            elif peer not in self.clients:
                self.send(peer, api.Refused("say Hello first"))
            else:
                yield peer, message

    def _greet(self, peer: bytes, hello: api.Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            reason = f"this engine speaks protocol version {PROTOCOL_VERSION}, the client {hello.version}"
            self.send(peer, api.Refused(reason))
        elif self._welcome is None:
            self._early[peer] = hello
        elif hello.model not in (None, self._welcome.model):
            self.send(peer, api.Refused(f"this engine serves {self._welcome.model!r}, not {hello.model!r}"))
        else:
            self.clients.setdefault(peer, Outbox())
            self.send(peer, self._welcome)
            if self._recovering is not None:
                self.send(peer, self._recovering)
            if len(self.clients) >= self._next_check:
                self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget idle clients that have gone, which only a send can detect: flush() and beat() send to all others."""
        nothing = api.OutputBatch(self._epoch, [])
        idle = [peer for peer, outbox in self.clients.items() if not outbox]
        self._forget([peer for peer in idle if self.send(peer, nothing) is Delivery.GONE])
        self._next_check = max(MIN_CHECKED, 2 * len(self.clients))

    def refuse_all(self, answer: api.Refused | api.Dying) -> bool:
        """Send `answer`, the reason why the engine cannot start, to all clients that have sent Hello. False if none
        has."""
        for _ in self.receive(sys.maxsize, MAX_REFUSAL_S):
            pass
        asked = list(self._early)
        for peer in asked:
            self.send(peer, answer)
        self._early.clear()
        return bool(asked)

    def send(self, peer: bytes, message: api.ToClient) -> Delivery:
        return self.listener.send(peer, engine_to_client.encode(message))

    def push(self, peer: bytes, output: api.Tokens | api.Finished) -> None:
        """Queue `output` for a client; flush() sends it."""
        outbox = self.clients.get(peer)
        if outbox is not None:
            outbox.add(output)

    def flush(self, now_s: float, *, at_once: bool = False) -> list[bytes]:
        """Send the outputs that may not wait, or all `at_once`. Forgets and returns the clients that have gone or are
        too slow."""
        lost = []
        for peer, outbox in self.clients.items():
            if not outbox or (not at_once and outbox.may_wait(now_s)):
                continue
            delivery = self._send_owed(peer, outbox)
            if delivery is Delivery.SENT:
                outbox.sent(now_s)
            elif delivery is Delivery.GONE:
                lost.append(peer)
            elif len(outbox) > MAX_OWED:
                logger.warning("a client has not read %d ends of its requests; the others are aborted", len(outbox))
                lost.append(peer)
            elif outbox.busy_since_s is None:
                outbox.busy_since_s = now_s
            elif now_s - outbox.busy_since_s > SLOW_READER_S:
                logger.warning("a client has not read for %.0f s; its requests are aborted", SLOW_READER_S)
                lost.append(peer)
        return self._forget(lost)

    def _send_owed(self, peer: bytes, outbox: Outbox) -> Delivery:
        """Send one message, or several if vectors and logprobs make it longer than a client accepts. Outputs that
        cannot be sent stay in the outbox."""
        count = len(outbox)
        while outputs := outbox.take()[:count]:
            payload = engine_to_client.encode(api.OutputBatch(self._epoch, outputs))
            if len(payload) > engine_to_client.max_bytes and count > 1:
                count = (count + 1) // 2
                continue
            delivery = self.listener.send(peer, payload)
            if delivery is not Delivery.SENT:
                return delivery
            outbox.drop(count)
        return Delivery.SENT

    def beat(self, now_s: float, step: int, with_requests: set[bytes]) -> list[bytes]:
        """Send a heartbeat to the clients with requests every HEARTBEAT_S. Returns those that are gone."""
        if now_s < self._next_heartbeat_s:
            return []
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        heartbeat = api.Heartbeat(self._epoch, step)
        return self._forget([peer for peer in with_requests if self.send(peer, heartbeat) is Delivery.GONE])

    def say_recovering(self, reason: str, attempt: int) -> None:
        """Send all clients, and those that connect before say_recovered(), that the workers are being replaced."""
        self._recovering = api.Recovering(self._epoch, reason, attempt)
        for peer in self.clients:
            self.send(peer, self._recovering)

    def say_recovered(self, generation: int, lost_s: float) -> None:
        self._recovering = None
        for peer in self.clients:
            self.send(peer, api.Recovered(self._epoch, generation, lost_s))

    def say_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """Send the list of adapters to all clients, and to those that connect later."""
        if self._welcome is not None:
            self._welcome = msgspec.structs.replace(self._welcome, adapters=adapters)
        for peer in self.clients:
            self.send(peer, AdapterList(adapters))

    def say_dying(self, reason: str, *, is_final: bool) -> None:
        """Send every client its unsent outputs, and then the reason why the engine ends."""
        self.flush(0.0, at_once=True)
        for peer in self.clients:
            self.send(peer, api.Dying(reason, is_final))

    def owes(self) -> bool:
        return any(self.clients.values())

    def gathers(self) -> bool:
        """Whether a client that is not slow has unsent outputs: flush() has to be called within GATHER_S."""
        return any(outbox and outbox.busy_since_s is None for outbox in self.clients.values())

    def pollables(self) -> tuple[Pollable, ...]:
        return tuple(self.listener.pollables())

    def close(self) -> None:
        self.listener.close()

    def _forget(self, peers: list[bytes]) -> list[bytes]:
        for peer in peers:
            self.clients.pop(peer, None)
        return peers


def _merge(earlier: api.Tokens | api.Finished, later: api.Tokens | api.Finished) -> api.Tokens | api.Finished:
    """Merge both into one message; `later` begins where `earlier` ends, unless the client asked for a resend."""
    if later.start != earlier.start + len(earlier.token_ids):
        return later
    logprobs = None
    if earlier.logprobs is not None or later.logprobs is not None:
        logprobs = (earlier.logprobs or []) + (later.logprobs or [])
    prompt = earlier.prompt or later.prompt
    if earlier.prompt is not None and later.prompt is not None:
        prompt = api.PromptLogprobs(earlier.prompt.start, earlier.prompt.entries + later.prompt.entries)
    return msgspec.structs.replace(
        later, start=earlier.start, token_ids=earlier.token_ids + later.token_ids, logprobs=logprobs, prompt=prompt
    )
