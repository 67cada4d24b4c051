"""Request: one client request with one sequence per sample; and Produced: the output of a step for one sample."""

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
    """Output of one step for one sample: tokens from output position `start` on. `reason` is None until the sample
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
    """`num_samples` sequences that share one prompt. All but the first fork from it once the prompt is computed.

    A request that is sent again with samples that have tokens starts with one sequence for each of them instead; these
    share the prompt's blocks only through the prefix cache.

    `media` have placeholders in the prompt and enter the hash of every block with placeholders; `contents` maps their
    digests to the encoder's input.
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
        """Pooling of the prompt; None: the request generates tokens."""
        self.adapter = adapter
        self.num_prompt = len(message.prompt) // 4
        self.marks = tuple(sorted({mark for mark in message.marks if 0 < mark <= self.num_prompt}))
        """Positions in the prompt where other prompts are likely to diverge, such as ends of messages."""
        self.media = message.media
        self.contents = {each.digest: each.content for each in message.contents}
        self.is_guided = bool(message.params.grammar)
        """Whether its outputs follow a grammar, which may force some tokens."""
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
        """Tokens generated here by ended samples: their sum, and the maximum of one sample."""
        self.drafts_by: dict[int, dict[str, DraftCounts]] = {}
        """Sample index -> method -> draft counts, of samples that have not ended."""
        self.logprobs: list[TokenLogprobs] = []
        """Logprobs of the last output tokens of a request with one sample, for forks by other clients."""
        self.num_scored = message.num_scored
        """Number of prompt tokens whose logprobs the client has, or has been sent."""
        search = (
            BeamSearch(message.params, self.num_prompt, max_len, stop_ids) if message.params.use_beam_search else None
        )
        self.beam = search
        self.beam_logprobs = {0: 0.0}
        self.candidates: dict[int, abc.Sequence[tuple[int, float]]] = {}
        """Beam index -> (token, logprob) candidates, of the beams that have finished the current step."""
        salt = () if message.params.cache_salt is None else (message.params.cache_salt,)
        self._adapter_key = "" if adapter is None else adapter.cache_key
        self.extra_keys = salt if adapter is None else ("lora", self._adapter_key, *salt)
        """Keys of the hash root: only requests with equal keys share KV. No salt can imitate an adapter."""
        self.draft_group = sha256(repr(self.extra_keys).encode()).digest()[:16]
        """Digest of `extra_keys`: drafts come only from the answers of requests with the same one."""
        self.num_samples = 1 if search else message.params.n
        self.unforked = [] if message.samples else list(range(1, self.num_samples))
        """Indices of the samples that fork once the prompt is computed."""
        started = message.samples or (SampleSoFar(0, message.output),)
        self.sequences = [self._sequence_of(sample, message.prompt) for sample in started]
        self.num_inherited = sum(sequence.num_inherited for sequence in self.sequences)

    def _sequence_of(self, sample: SampleSoFar, prompt: bytes) -> Sequence:
        tokens = array("I", prompt)
        tokens.frombytes(sample.output)
        return Sequence(self, sample.index, tokens, num_inherited=len(sample.output) // 4)

    @property
    def has_lasting_keys(self) -> bool:
        """Whether other and later engines can use its keys. With an adapter, only if the workers have loaded it from
        the files whose digest is in the keys."""
        adapter = self.adapter
        return adapter is None or (bool(adapter.digest) and adapter.cache_key == self._adapter_key)

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].num_tokens

    @property
    def lacks_scores(self) -> bool:
        """Whether every prompt token has to be computed for its own result: prompt logprobs, or pooling of all."""
        if self.pooling is not None:
            return self.pooling.reads_all
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt

    def lose_workers(self) -> None:
        """Forget the workers' state of all sequences. Beams that have candidates compute them again with the others."""
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
    """All token ids that end a sequence."""
    return frozenset(params.stop_token_ids) if params.ignore_eos else eos_token_ids.union(params.stop_token_ids)
