"""Request: what one client asked for, as one sequence per sample; and Produced: what it gets from each step."""

from array import array
from collections import abc
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from vllm_lite.engine.scheduling.beam import BeamSearch
from vllm_lite.engine.sequence import Sequence
from vllm_lite.protocol.api import Generate, PromptLogprobs, SampleSoFar, TokenLogprobs
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import DraftCounts, FinishReason

if TYPE_CHECKING:  # adapters know sequences
    from vllm_lite.engine.adapters import Adapter


class Produced(NamedTuple):
    """Output of one step for one sample: tokens that begin at output position `start`. `reason` is None until it
    ends."""

    request: "Request"
    sample: int
    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    reason: FinishReason | None = None
    error: str | None = None
    logprob: float | None = None
    prompt: PromptLogprobs | None = None
    pooled: bytes | None = None


class Request:
    """`num_samples` sequences share one prompt. All but the first fork from it once the prompt is computed.

    A request that is sent again with samples that have tokens begins with a sequence for each of them instead, and they
    share the prompt's blocks through the prefix cache alone.

    `media` have placeholders in the prompt, and are part of the hash of every block with such placeholders;
    `contents` has what an encoder reads of them, by their digests.
    """

    def __init__(
        self,
        message: Generate,
        client: bytes,
        max_len: int,
        stop_ids: frozenset[int],
        adapter: "Adapter | None" = None,
    ) -> None:
        """The tokens of `message` are checked and its seed is drawn. Every sequence ends at `max_len` at the latest."""
        self.request_id = message.request_id
        self.client = client
        self.external_id = message.external_id
        self.context = message.context
        self.params = message.params
        self.pooling = message.pooling
        """What is made of the prompt instead of tokens; None: tokens."""
        self.adapter = adapter
        self.num_prompt = len(message.prompt) // 4
        self.marks = tuple(sorted({mark for mark in message.marks if 0 < mark <= self.num_prompt}))
        """Positions in the prompt from which other prompts are likely to differ: ends of messages, of a state."""
        self.media = message.media
        self.contents = {each.digest: each.content for each in message.contents}
        self.is_guided = bool(message.params.grammar)
        """Whether its outputs follow a grammar, which may leave no choice of some tokens."""
        self.max_len = max_len
        self.stop_ids = stop_ids
        self.arrival = 0
        self.num_preemptions = 0
        self.deadline_s: float | None = None
        self.num_cached_at_start: int | None = None
        self.queued_s = 0.0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.num_generated = self.longest_output = 0
        """Tokens that ended samples generated here: the sum, and the most of one sample."""
        self.drafts_by: dict[int, dict[str, DraftCounts]] = {}
        """The drafts of each sample that has not ended, by their method."""
        self.logprobs: list[TokenLogprobs] = []
        """Those of the last output tokens, if it has one sample: a fork by another client than its own needs them."""
        self.num_scored = message.num_scored
        """Prompt tokens whose logprobs the client has, or has been sent."""
        search = (
            BeamSearch(message.params, self.num_prompt, max_len, stop_ids) if message.params.use_beam_search else None
        )
        self.beam = search
        self.beam_logprobs = {0: 0.0}
        self.candidates: dict[int, abc.Sequence[tuple[int, float]]] = {}
        """The (token, logprob) candidates of the beams that have finished the current step, by their index."""
        salt = () if message.params.cache_salt is None else (message.params.cache_salt,)
        self._adapter_key = "" if adapter is None else adapter.cache_key
        self.extra_keys = salt if adapter is None else ("lora", self._adapter_key, *salt)
        """What must be equal for KV to be shared; no salt makes one tuple look like another."""
        self.draft_group = sha256(repr(self.extra_keys).encode()).digest()[:16]
        """The same in short, for drafts from the answers of other requests."""
        self.num_samples = 1 if search else message.params.n
        self.unforked = [] if message.samples else list(range(1, self.num_samples))
        """Indices of the samples that fork once the prompt is computed."""
        born = message.samples or (SampleSoFar(0, message.output),)
        self.sequences = [self._born(message.prompt, sample) for sample in born]
        self.num_inherited = sum(sequence.num_inherited for sequence in self.sequences)

    def _born(self, prompt: bytes, sample: SampleSoFar) -> Sequence:
        tokens = array("I", prompt)
        tokens.frombytes(sample.output)
        return Sequence(self, sample.index, tokens, num_inherited=len(sample.output) // 4)

    @property
    def has_lasting_keys(self) -> bool:
        """Whether its keys mean the same to other engines and to later ones. With an adapter that is so if the workers
        have it from the files whose digest is in the keys."""
        adapter = self.adapter
        return adapter is None or (bool(adapter.digest) and adapter.cache_key == self._adapter_key)

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].num_tokens

    @property
    def lacks_scores(self) -> bool:
        """Whether something of each of its prompt's tokens is still to be computed: logprobs, or a part of what is
        pooled of all of them."""
        if self.pooling is not None:
            return self.pooling.reads_all
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt

    def lose_workers(self) -> None:
        """No worker knows any of it. Beams that have their candidates already compute them again, with the others."""
        self.candidates = {}
        for sequence in self.sequences:
            sequence.lose_workers()

    def open_samples(self) -> list[tuple[int, int]]:
        """(index, number of output tokens) of every sample that has not ended."""
        if self.beam is not None:
            return [(index, 0) for index in range(self.beam.width)]
        started = [(sequence.index, sequence.num_output) for sequence in self.sequences]
        return started + [(index, 0) for index in self.unforked]

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.sequences})"


def stop_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Every token that ends a sequence."""
    return frozenset(params.stop_token_ids) if params.ignore_eos else eos_token_ids.union(params.stop_token_ids)
