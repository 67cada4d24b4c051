"""A worker without a model: it keeps a fake KV cache and checks, position by position, that the engine's block tables
lead every sequence to exactly its own history. The next token is a hash of all tokens before it and the sample; and of
the seed where the temperature is above 1, so that forks can part from their parents."""

from collections import abc, deque
from hashlib import blake2b
from typing import NamedTuple

from vllm_lite.protocol.api import PromptLogprobs, TokenLogprobs
from vllm_lite.protocol.codec import engine_to_worker, pack_tokens, unpack_tokens, worker_to_engine
from vllm_lite.protocol.control import AdapterRead, BeginProfile, EndProfile, Profiled, StepTiming
from vllm_lite.protocol.encoder import DemoteEncoded, Encode, EncodeAside, FreeEncoded, PromoteEncoded
from vllm_lite.protocol.params import Sampling, SamplingParams
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.step import (
    BlockOp,
    Continue,
    Draft,
    Finish,
    Fork,
    Handle,
    ModelOutput,
    NewRequest,
    Preempt,
    ReplaceBlock,
    Resume,
    SchedulerOutput,
    SetToken,
    States,
)
from vllm_lite.protocol.transfers import Transfer, TransferAnswer

Slot = tuple[int, int, tuple[int, ...]]
"""Content of one position of a block: the group, the adapter, and the whole prefix from which it was computed."""


class StateOf(NamedTuple):
    """Content of a slot of recurrent states: the adapter, and all tokens that the state has taken up."""

    adapter: int
    tokens: tuple[int, ...]


def next_token(tokens: abc.Sequence[int], vocab_size: int, sample: int = 0, seed: int = 0) -> int:
    """Next token of the simulated model after `tokens`; samples of one prompt differ."""
    data = b"".join(number.to_bytes(4, "little") for number in (sample, *tokens, *((seed,) if seed else ())))
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") % vocab_size


def seed_of(params: Sampling | SamplingParams) -> int:
    """The seed that the simulated model follows, 0 for none."""
    return params.seed or 0 if params.temperature > 1 else 0


def candidates(tokens: abc.Sequence[int], vocab_size: int, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely next tokens of the simulated model, with different logprobs."""
    scores = {
        token: -int.from_bytes(blake2b(repr((token, *tokens)).encode(), digest_size=4).digest(), "little") / 2**30
        for token in range(vocab_size)
    }
    best = sorted(scores, key=lambda token: -scores[token])[:count]
    return tuple((token, scores[token]) for token in best)


class History:
    """A worker's data of one sequence."""

    def __init__(self, tokens: list[int], sampling: Sampling, num_groups: int, num_prompt: int = 0) -> None:
        self.tokens = tokens
        self.sampling = sampling
        self.num_prompt = num_prompt
        self.adapter = 0
        self.media: tuple[Media, ...] = ()
        self.num_scored = 1
        self.num_computed = 0
        self.num_cached = 0
        self.pooling: Pooling | None = None
        self.num_pooled = 0
        self.grammar_is_ready = sampling.rules is None or not sampling.rules.grammar
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.source = self.live = 0
        self.saves: list[tuple[int, int]] = []

    def append(self, block_ids: list[list[int]]) -> None:
        for table, ids in zip(self.tables, block_ids or [[] for _ in self.tables], strict=True):
            table.extend(ids)


class FakeProfiles:
    """The profiling part of an executor: stores calls, and answers as a test sets it."""

    profiles: list[str]
    profile_answers: list[Profiled] | None

    def check(self) -> None:
        """Raise WorkersLostError if there are no workers."""

    def transfer(self, message: Transfer) -> None:
        raise AssertionError(f"no disk, and {message}")

    def transferred(self) -> list[TransferAnswer]:
        return []

    def profile(self, message: BeginProfile | EndProfile) -> None:
        self.profiles.append(type(message).__name__)

    def profiled(self) -> list[Profiled] | None:
        self.check()
        return self.profile_answers


class SimulatedWorker:
    """An executor whose steps run at once. `windows` has one entry per KV group, None for full attention."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 10**9,
        vocab_size: int = 50,
        windows: abc.Sequence[int | None] = (None,),
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.windows = windows
        self.num_blocks = num_blocks
        self.states: dict[int, StateOf] | None = None
        """Content of each state slot, for a model with recurrent layers. A slot that was never written has no entry."""
        self.kv: list[list[Slot | None]] = [[None] * block_size for _ in range(num_blocks + num_host_blocks)]
        self.sequences: dict[Handle, History] = {}
        self.resident: set[Handle] = set()
        self.num_written = 0
        self.num_drafted = self.num_accepted = 0
        self.num_scheduled: list[int] = []
        self.ops: list[tuple[int, int, int]] = []
        self.is_dead = False
        self.is_compiling: abc.Callable[[], bool] = lambda: False
        """Called when a sequence with a grammar would get its first token; if true, it gets none."""
        self.num_held_back = 0
        self.encoded: set[bytes] = set()
        self.encoded_on_host: set[bytes] = set()
        self.aside: dict[bytes, int] = {}
        """Media that are encoded beside steps -> number of further steps until they are ready."""
        self.num_encoded = 0
        self.reads_media = self.gets_media = False
        """Whether it checks that media in steps have vectors, and whether vectors may also be received from
        elsewhere."""
        self._outputs: deque[ModelOutput] = deque()
        self.adapters: set[int] = set()
        self.max_adapters = 10**9
        self.unreadable: set[str] = set()
        """Paths of adapters that cannot be read."""
        self._read: list[AdapterRead] = []

    def read_adapter(self, number: int, name: str, path: str) -> None:
        assert number not in self.adapters
        error = f"adapter {name!r} cannot be read" if path in self.unreadable else None
        if error is None:
            self.adapters.add(number)
        self._read.append(AdapterRead(0, 0, number, error, is_missing=path == "/missing"))

    def drop_adapter(self, number: int) -> None:
        self.adapters.discard(number)

    def adapters_read(self) -> list[AdapterRead]:
        read, self._read = self._read, []
        return read

    def timings(self) -> tuple[StepTiming, ...]:
        return ()

    def expert_tokens(self) -> list[list[int]]:
        """Expert counts: none."""
        return []

    def die(self) -> None:
        """Lose all data, including results that were not fetched."""
        self.is_dead = True
        self._outputs.clear()

    def submit(self, *steps: SchedulerOutput) -> None:
        assert not self.is_dead
        for step in steps:
            decoded = engine_to_worker.decode(engine_to_worker.encode(step))
            assert isinstance(decoded, SchedulerOutput)
            self._outputs.append(self.execute(decoded))

    def poll(self) -> ModelOutput | None:
        return self._outputs.popleft() if self._outputs else None

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        for op, src, dst in output.block_ops:
            assert src != dst
            assert 0 not in (src, dst)
            if op in (BlockOp.STATE_OUT, BlockOp.STATE_IN):
                assert src in self._states(), f"op {op} moves slot {src}, in which no state was ever left"
                self._states()[dst] = self._states()[src]
                continue
            self.kv[dst] = self.kv[src].copy()
            self.ops.append((op, src, dst))
        scheduled = [step for entry in output.entries if (step := self._apply(entry)) is not None]
        assert len({handle for handle, _, _ in scheduled}) == len(scheduled), "a sequence is scheduled twice"
        assert len(self.resident) <= self.max_num_seqs
        assert len({self.sequences[handle].adapter for handle in self.resident} - {0}) <= self.max_adapters
        for handle, count, _ in scheduled if self.reads_media else ():
            start = self.sequences[handle].num_computed
            for medium in self.sequences[handle].media:
                is_read = medium.start < start + count and medium.end > start
                if is_read and self.aside.pop(medium.digest, None) is not None:  # the rest is computed at once
                    self.encoded.add(medium.digest)
                assert not is_read or medium.digest in self.encoded, f"{handle} reads a medium that is not encoded"
        self.num_scheduled.append(sum(count + drafts for _, count, drafts in scheduled))
        drafts = {handle: self._draft(self.sequences[handle], number) for handle, _, number in scheduled}
        for handle, count, _ in scheduled:  # a layer writes all KV of the batch ...
            self._write(self.sequences[handle], count, drafts[handle])
        tentative = self._advance_states(scheduled, drafts)
        scores = [found for handle, count, _ in scheduled if (found := self._score(handle, count)) is not None]
        tokens: list[int] = []
        counts: list[int] = []
        drafted: list[int] = []
        pooled: list[tuple[Handle, bytes]] = []
        logprobs: list[TokenLogprobs | None] = []
        for handle, count, _ in scheduled:  # ... before it reads any
            sampled = self._sample(self.sequences[handle], count, drafts[handle])
            if sampled == [] and self.sequences[handle].pooling is not None:
                pooled.append((handle, pack_tokens(self.sequences[handle].tokens)))
            if sampled is not None:
                tokens += sampled
                counts.append(len(sampled))
                drafted.append(len(drafts[handle]))
                logprobs += [self._logprobs(self.sequences[handle], len(sampled))] * len(sampled) if sampled else []
        for history in tentative:  # accepted drafts become part of the history
            self._states()[history.live] = StateOf(history.adapter, tuple(history.tokens[: history.num_computed]))
            history.source = history.live
        reply = ModelOutput(
            output.generation,
            output.step,
            pack_tokens(tokens),
            counts if any(count != 1 for count in counts) else None,
            logprobs if any(logprobs) else None,
            prompts=scores or None,
            drafted=drafted if any(drafted) else None,
            pooled=pooled or None,
            encoded=self._encode_aside() or None,
        )
        decoded = worker_to_engine.decode(worker_to_engine.encode(reply))
        assert isinstance(decoded, ModelOutput)
        return decoded

    def _apply(self, entry: object) -> tuple[Handle, int, int] | None:
        match entry:
            case NewRequest():
                assert entry.handle not in self.sequences
                history = History(
                    unpack_tokens(entry.tokens), entry.sampling, len(self.windows), entry.num_prompt_tokens
                )
                history.adapter = entry.adapter
                history.media = entry.media
                self.sequences[entry.handle] = history
                history.pooling = entry.pooling
                self._place(history, entry)
            case Resume():
                assert entry.handle not in self.resident
                self.sequences[entry.handle].tables = [[] for _ in self.windows]
                self._place(self.sequences[entry.handle], entry)
            case Continue() | Draft():
                assert entry.handle in self.resident
                self.sequences[entry.handle].append(entry.new_block_ids)
            case _:
                self._change(entry)
                return None
        self.resident.add(entry.handle)
        if isinstance(entry, Draft):
            assert entry.max_drafts > 0
            return entry.handle, 1, entry.max_drafts
        assert entry.num_tokens > 0
        return entry.handle, entry.num_tokens, 0

    def _encode_aside(self) -> list[bytes]:
        """Advance the media that are encoded beside steps. Returns those that are ready now."""
        self.aside = {digest: left - 1 for digest, left in self.aside.items()}
        done = [digest for digest, left in self.aside.items() if left <= 0]
        self.encoded.update(done)
        for digest in done:
            del self.aside[digest]
        return done

    def _change(self, entry: object) -> None:
        match entry:
            case Preempt():
                self.resident.remove(entry.handle)
            case Finish():
                del self.sequences[entry.handle]
                self.resident.discard(entry.handle)
            case ReplaceBlock():
                assert entry.handle in self.resident
                self.sequences[entry.handle].tables[entry.group][entry.index] = entry.block_id
            case States():
                assert entry.handle in self.resident
                history = self.sequences[entry.handle]
                history.source, history.live, history.saves = entry.source, entry.live, list(entry.saves)
            case Encode():
                assert self.gets_media or entry.digest not in self.encoded, "a medium is encoded twice"
                self.encoded.add(entry.digest)
                self.num_encoded += 1
            case EncodeAside():
                assert self.gets_media or entry.digest not in self.encoded, "a medium is encoded twice"
                self.aside[entry.digest] = 3
                self.num_encoded += 1
            case FreeEncoded():
                known = self.encoded | self.encoded_on_host | self.aside.keys()
                assert self.gets_media or known.issuperset(entry.digests)
                self.encoded.difference_update(entry.digests)
                self.encoded_on_host.difference_update(entry.digests)
                for digest in entry.digests:
                    self.aside.pop(digest, None)
            case DemoteEncoded():
                self.encoded.update(digest for digest in entry.digests if self.aside.pop(digest, None) is not None)
                _pass_on(self.encoded, self.encoded_on_host, entry.digests)
            case PromoteEncoded():
                _pass_on(self.encoded_on_host, self.encoded, entry.digests)
            case SetToken():
                self.sequences[entry.handle].tokens[-1] = entry.token_id
            case Fork():
                assert entry.parent in self.resident
                assert entry.child not in self.sequences
                parent = self.sequences[entry.parent]
                assert len(parent.tokens) >= entry.num_tokens
                child = History(parent.tokens[: entry.num_tokens], entry.sampling, len(self.windows))
                num_blocks = -(-entry.num_tokens // self.block_size)
                child.tables = [table[:num_blocks] for table in parent.tables]
                child.adapter, child.media = parent.adapter, parent.media
                child.num_computed, child.num_cached = (entry.num_computed, entry.num_cached)
                self.sequences[entry.child] = child
                self.resident.add(entry.child)

    def _states(self) -> dict[int, StateOf]:
        return {} if self.states is None else self.states

    def _advance_states(
        self, scheduled: list[tuple[Handle, int, int]], drafts: dict[Handle, list[int]]
    ) -> list[History]:
        """Move all sequences' states at once, and check that no slot is read that another sequence writes, and none is
        written twice. Returns the sequences with drafts, which save no state yet."""
        tentative: list[History] = []
        if self.states is None:
            return tentative
        before, read, written = dict(self.states), dict[int, Handle](), dict[int, Handle]()
        for handle, count, _ in scheduled:
            history = self.sequences[handle]
            start, end = history.num_computed, history.num_computed + count
            taken_up = before[history.source] if history.source else StateOf(history.adapter, ())
            wanted = StateOf(history.adapter, tuple(history.tokens[:start]))
            assert taken_up == wanted, f"{handle} begins at {start} with {taken_up}, not {wanted}"
            read.setdefault(history.source, handle)
            due = [save for save in history.saves if save[0] <= end]
            history.saves = history.saves[len(due) :]
            if drafts[handle]:
                assert not due, "a state would be saved behind drafts"
                assert written.setdefault(history.live, handle) == handle
                tentative.append(history)
                continue
            for position, slot in [*due, (end, history.live)]:
                assert slot, "slot 0 is never written"
                assert written.setdefault(slot, handle) == handle
                self.states[slot] = StateOf(history.adapter, tuple(history.tokens[:position]))
                history.source = slot
        for slot, handle in read.items():
            assert written.get(slot, handle) == handle, f"{handle} reads slot {slot} while another writes it"
        return tentative

    def _place(self, history: History, entry: NewRequest | Resume) -> None:
        history.num_computed, history.num_cached = entry.num_computed, entry.num_cached
        history.append(entry.block_ids)

    def _next(self, tokens: list[int], sampling: Sampling) -> int:
        return next_token(tokens, self.vocab_size, sampling.sample, seed_of(sampling))

    def _draft(self, history: History, max_drafts: int) -> list[int]:
        """Drafts of which two out of three are right."""
        tokens = list(history.tokens)
        for _ in range(max_drafts if history.grammar_is_ready else 0):
            right = self._next(tokens, history.sampling)
            tokens.append(right if right % 3 else (right + 1) % self.vocab_size)
        return tokens[len(history.tokens) :]

    def _write(self, history: History, count: int, drafts: list[int]) -> None:
        assert not history.adapter or history.adapter in self.adapters, "its adapter is not loaded"
        tokens = history.tokens + drafts
        start, end = history.num_computed, history.num_computed + count + len(drafts)
        assert end <= len(tokens)
        for position in range(max(start, history.num_cached), end):
            for group, table in enumerate(history.tables):
                block_id = table[position // self.block_size]
                assert 0 < block_id < self.num_blocks, "only device blocks are written, and never the null block"
                self.kv[block_id][position % self.block_size] = (group, history.adapter, tuple(tokens[: position + 1]))
            self.num_written += 1

    def _score(self, handle: Handle, count: int) -> tuple[Handle, PromptLogprobs] | None:
        """If asked for, the logprobs of the prompt tokens that follow the ones computed in a step: here, minus their
        positions."""
        history = self.sequences[handle]
        first, end = history.num_scored, min(history.num_computed + count + 1, history.num_prompt)
        if history.sampling.prompt_logprobs is None or first >= end:
            return None
        assert history.num_computed < first, "tokens that are to be scored are left out"
        history.num_scored = end
        return handle, PromptLogprobs(first, [TokenLogprobs(-float(token), 1, ()) for token in range(first, end)])

    def _sample(self, history: History, count: int, drafts: list[int]) -> list[int] | None:
        """Check the contents that the sequence reads, and sample if it is caught up; drafts are accepted as long as
        they are right."""
        self._check_history(history, history.tokens + drafts, history.num_computed, count + len(drafts))
        if history.pooling is not None and history.pooling.reads_all:
            assert history.num_computed <= history.num_pooled, "tokens that are to be pooled are left out"
            history.num_pooled = max(history.num_pooled, history.num_computed + count)
        history.num_computed += count
        if history.num_computed < len(history.tokens):
            return None
        if history.pooling is not None:
            assert not drafts
            return []
        if not history.grammar_is_ready and self.states is None and self.is_compiling():
            self.num_held_back += 1
            history.num_computed -= 1
            history.num_cached = max(history.num_cached, len(history.tokens))
            return []
        history.grammar_is_ready = True
        sampled = []
        for draft in [*drafts, None]:
            sampled.append(self._next(history.tokens, history.sampling))
            history.tokens.append(sampled[-1])
            if draft != sampled[-1]:
                break
            history.num_computed += 1
        self.num_drafted += len(drafts)
        self.num_accepted += len(sampled) - 1
        return sampled

    def _check_history(self, history: History, tokens: list[int], start: int, count: int) -> None:
        for group, (window, table) in enumerate(zip(self.windows, history.tables, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, start + count):
                slot = self.kv[table[position // self.block_size]][position % self.block_size]
                wanted = (group, history.adapter, tuple(tokens[: position + 1]))
                assert slot == wanted, f"position {position} of group {group} holds {slot}, not {wanted}"

    def _logprobs(self, history: History, num_sampled: int) -> TokenLogprobs | None:
        count = history.sampling.logprobs
        if count is None:
            return None
        return TokenLogprobs(-1.0, 1, candidates(history.tokens[:-num_sampled], self.vocab_size, count))


def _pass_on(source: set[bytes], target: set[bytes], digests: abc.Iterable[bytes]) -> None:
    for digest in digests:
        source.remove(digest)
        target.add(digest)
