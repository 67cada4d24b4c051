"""A worker without a model: it keeps a fake KV cache and checks, position by position, that the engine's block tables
lead every sequence to exactly its own history. The next token is a hash of all tokens before it."""

from collections import deque
from hashlib import blake2b

from vllm_lite.protocol.codec import engine_to_worker, pack_tokens, unpack_tokens, worker_to_engine
from vllm_lite.protocol.step import (
    Continue,
    Finish,
    Handle,
    ModelOutput,
    NewRequest,
    Preempt,
    Resume,
    SchedulerOutput,
)


def next_token(tokens: list[int], vocab_size: int) -> int:
    """What the simulated model says after `tokens`."""
    digest = blake2b(b"".join(token.to_bytes(4, "little") for token in tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


class Sequence:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_computed = 0
        self.num_cached = 0
        self.table: list[int] = []


class SimulatedWorker:
    """An executor whose steps run at once. A slot holds the whole prefix it was computed from."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int = 10**9, vocab_size: int = 50) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.kv: list[list[tuple[int, ...] | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.sequences: dict[Handle, Sequence] = {}
        self.resident: set[Handle] = set()
        self.num_written = 0
        self.num_scheduled: list[int] = []
        self.message_bytes: list[int] = []
        self._outputs: deque[ModelOutput] = deque()

    def submit(self, output: SchedulerOutput) -> None:
        payload = engine_to_worker.encode(output)
        self.message_bytes.append(len(payload))
        decoded = engine_to_worker.decode(payload)
        assert isinstance(decoded, SchedulerOutput)
        self._outputs.append(self.execute(decoded))

    def poll(self) -> ModelOutput | None:
        return self._outputs.popleft() if self._outputs else None

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        scheduled = [
            (handle, count) for entry in output.entries if (step := self._apply(entry)) for handle, count in [step]
        ]
        assert len(self.resident) <= self.max_num_seqs
        self.num_scheduled.append(sum(count for _, count in scheduled))
        for handle, count in scheduled:  # a layer writes all KV of the batch ...
            self._write(self.sequences[handle], count)
        sampled = []
        for handle, count in scheduled:  # ... before it reads any
            sequence = self.sequences[handle]
            self._check_history(sequence, sequence.num_computed + count)
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.tokens):
                token = next_token(sequence.tokens, self.vocab_size)
                sequence.tokens.append(token)
                sampled.append(token)
        reply = worker_to_engine.decode(
            worker_to_engine.encode(ModelOutput(output.epoch, output.step, pack_tokens(sampled)))
        )
        assert isinstance(reply, ModelOutput)
        return reply

    def _apply(self, entry: object) -> tuple[Handle, int] | None:
        match entry:
            case NewRequest():
                assert entry.handle not in self.sequences
                sequence = Sequence(unpack_tokens(entry.tokens))
                self.sequences[entry.handle] = sequence
                self._place(sequence, entry)
            case Resume():
                assert entry.handle not in self.resident
                self._place(self.sequences[entry.handle], entry)
            case Continue():
                assert entry.handle in self.resident
                self.sequences[entry.handle].table += entry.new_block_ids[0] if entry.new_block_ids else []
            case Preempt():
                self.resident.remove(entry.handle)
                return None
            case Finish():
                del self.sequences[entry.handle]
                self.resident.discard(entry.handle)
                return None
        assert isinstance(entry, NewRequest | Resume | Continue)
        assert entry.num_tokens > 0
        self.resident.add(entry.handle)
        return entry.handle, entry.num_tokens

    def _place(self, sequence: Sequence, entry: NewRequest | Resume) -> None:
        sequence.num_computed, sequence.num_cached = entry.num_computed, entry.num_cached
        sequence.table = list(entry.block_ids[0])

    def _write(self, sequence: Sequence, count: int) -> None:
        assert sequence.num_computed + count <= len(sequence.tokens)
        for position in range(sequence.num_computed, sequence.num_computed + count):
            if position >= sequence.num_cached:
                block_id = sequence.table[position // self.block_size]
                assert block_id != 0, "the null block must never be written"
                self.kv[block_id][position % self.block_size] = tuple(sequence.tokens[: position + 1])
                self.num_written += 1

    def _check_history(self, sequence: Sequence, end: int) -> None:
        for position in range(end):
            slot = self.kv[sequence.table[position // self.block_size]][position % self.block_size]
            assert slot == tuple(sequence.tokens[: position + 1]), f"position {position} holds another sequence's KV"
