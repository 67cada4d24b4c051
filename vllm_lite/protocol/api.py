"""Client <-> engine. Token ids travel as little-endian u32 bytes (`array('I')`); requests by the client's own id.

A client sends Hello and gets Welcome or Refused. After that every Generate is answered by any number of Tokens and
exactly one Finished, rejections included, both inside OutputBatch.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, AdapterList, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, ExternalId, FindExternal
from vllm_lite.protocol.histograms import BlockHistograms, Counts, DraftCounts, RequestHistograms
from vllm_lite.protocol.operations import Operation, OperationDone
from vllm_lite.protocol.params import MAX_SAMPLES, SamplingParams
from vllm_lite.protocol.pooling import MAX_POOLED_BYTES, PoolerInfo, Pooling
from vllm_lite.protocol.spans import MAX_MEDIA, PromptMedia
from vllm_lite.protocol.transfers import TierUsage
from vllm_lite.protocol.view import Look, Seen

MAX_PROMPT_BYTES = 16 * 1024 * 1024
"""Room for four million tokens of four bytes."""
MAX_CONTEXT_BYTES, MAX_MARKS = 64 * 1024, 4096

RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Context = Annotated[bytes, Meta(max_length=MAX_CONTEXT_BYTES)]
TokenBytes = Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)]
Pooled = Annotated[bytes, Meta(max_length=MAX_POOLED_BYTES)]
"""Numbers as little-endian float32."""
FinishReason = Literal["stop", "length", "abort", "error"]
RestartCause = Literal["died", "failed", "unreachable", "silent", "stuck", "engine"]
"""What happened to a worker before its group was replaced; "engine": the engine itself was."""


# ---- client -> engine


class Hello(Message, tag="hello"):
    """First message of a client. `model=None` takes whatever model the engine serves."""

    version: int
    model: Annotated[str, Meta(max_length=4096)] | None = None


class SampleSoFar(Message):
    """A sample of a request that has not ended, with the output tokens that its client has."""

    index: Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)]
    output: TokenBytes = b""


class Generate(Message, tag="generate"):
    """Start a request, or attach to it again. Idempotent: if the engine knows `request_id`, with the same prompt and
    parameters, the stream goes on to this client from output token `have`; a stream of another client ends with an
    error. If not, `output` (empty, or exactly `have` token ids) is what had been generated before, and generation goes
    on behind it.

    Of a request with several samples `samples` says the same for each: those that have not ended, with their tokens;
    the others have. `have` and `output` are empty then. Without `samples` all begin with the prompt. `num_scored` is
    the number of prompt tokens whose logprobs the client has; they are not sent again.

    `marks` are places in the prompt, in tokens and ascending, where later ones are likely to part from it, such as ends
    of messages: recurrent layers save states there; else prompts go on at a mark that they share, also within a block.
    `external_id` is the id under which users know the request: the prompts of one HTTP body share one. Any client may
    name it in Describe and AbortExternal. `context` means nothing to the engine, which returns it in Descriptions.
    `adapter` is the name of a LoRA adapter that has been loaded; empty: the model alone.

    With `pooling` nothing is generated: the request ends once its prompt is computed, and its Finished has what the
    pooler made of it. Of `params` it needs who asks, until when, and how urgent it is.

    `media` lie in the prompt, in order and apart, where `prompt` has placeholders; `contents` is read by the encoder.
    """

    request_id: RequestId
    prompt: TokenBytes
    params: SamplingParams
    have: Annotated[int, Meta(ge=0)] = 0
    output: TokenBytes = b""
    external_id: ExternalId = ""
    context: Context = b""
    samples: Annotated[tuple[SampleSoFar, ...], Meta(max_length=MAX_SAMPLES)] = ()
    num_scored: Annotated[int, Meta(ge=0)] = 0
    pooling: Pooling | None = None
    adapter: Annotated[str, Meta(max_length=256)] = ""
    marks: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...], Meta(max_length=MAX_MARKS)] = ()
    media: PromptMedia = ()
    contents: Annotated[tuple[MediaContent, ...], Meta(max_length=MAX_MEDIA)] = ()


class ForkRequest(Message, tag="fork"):
    """A new request `child_id` that goes on from the first `have` output tokens of a live one, sharing its KV and its
    adapter.

    Its stream begins at token `have`, with draws of its own (`params.seed`). `external_id` and `context` are those of
    the new request, as in Generate.
    """

    request_id: RequestId
    child_id: RequestId
    have: Annotated[int, Meta(ge=0)]
    params: SamplingParams
    external_id: ExternalId = ""
    context: Context = b""


class Abort(Message, tag="abort"):
    """End a request of this client, or those of its `samples`; no `samples` means all. Others' requests go on.

    Each of them that is still open gets its Finished, and with the last one the request ends. Beams end together only:
    naming some of them ends none. `stopped`: it has all it wanted, such as a stop string; only metrics show the
    difference.
    """

    request_id: RequestId
    stopped: bool = False
    samples: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)], ...], Meta(max_length=MAX_SAMPLES)] = ()


class Ping(Message, tag="ping"):
    """Asks for a Heartbeat at once; the answer proves that the engine's loop is running."""


class GetStats(Message, tag="get_stats"):
    pass


class Describe(Message, tag="describe"):
    """Asks how requests are, of any client: those with these ids, and all with an external id. Answered by one
    Descriptions; if that is a single request, `with_content` asks for its parameters, tokens and logprobs as well."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=1024)] = ()
    external_id: ExternalId = ""
    with_content: bool = False


class ResetPrefixCache(Message, tag="reset_prefix_cache"):
    """Forget all that is cached, on the device and on the host; answered by PrefixCacheReset.

    Nothing computed before is found by a request that comes later, but for what is on disk, unless that is `stored` to
    be forgotten as well. What runs goes on with the KV it has.
    """

    stored: bool = False


# ---- engine -> client


class Welcome(Message, tag="welcome"):
    """The engine is ready to serve. `max_model_len` is what its KV pool can really hold for one request. `tokenizer` is
    the folder of the tokenizer on the engine's host, for clients that know only an address. If the engine dies another
    one takes its place, unless it is not `is_supervised`: then its death is the end of every request. `max_loras`: how
    many different LoRA adapters a step may have; 0: none are served. `wants_marks`: it has recurrent layers, so that
    the ends of messages are of use as marks of a Generate. `placeholders` has for each kind of media that the model
    takes the token that stands for it in a prompt, `kernels` what computes it, in words for people."""

    version: int
    epoch: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    tokenizer: str | None = None
    is_supervised: bool = True
    pooler: PoolerInfo = PoolerInfo()
    adapters: tuple[AdapterInfo, ...] = ()
    max_loras: int = 0
    wants_marks: bool = False
    placeholders: dict[str, int] = msgspec.field(default_factory=dict)
    kernels: dict[str, str] = msgspec.field(default_factory=dict)


class Refused(Message, tag="refused"):
    """The handshake failed, for the reason given; nothing else will be answered.

    `bad_input` says that the engine cannot start because its model or configuration is at fault.
    """

    reason: str
    bad_input: bool = False


class Dying(Message, tag="dying"):
    """The engine ends because something broke. `is_final`: this is the end of every request, whatever is sent after it.
    Otherwise another engine is about to take its place at the same address."""

    reason: str
    is_final: bool = True


class Recovering(Message, tag="recovering"):
    """The workers are being replaced, for the `attempt`-th time in a row; streams pause, and go on with the tokens that
    they would have had. It comes to all clients; Recovered follows, or Dying."""

    epoch: int
    reason: str
    attempt: int


class Recovered(Message, tag="recovered"):
    """The workers of `generation` serve, after a pause of `lost_s`."""

    epoch: int
    generation: int
    lost_s: float


class TokenLogprobs(Message):
    """One sampled token: its raw log-softmax, its rank (1 = most likely), and the top (id, logprob) pairs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(Message):
    """Logprobs of the prompt tokens from number `start` on; the first one, number 0, has none. May come again."""

    start: int
    entries: list[TokenLogprobs]


class Tokens(Message, tag="tokens"):
    """Output tokens `start .. start + len(token_ids)` of sample `index` of a request; the sample goes on.

    `prompt` comes, where asked for, in pieces, in order, before the first token of sample 0 or with it.
    """

    request_id: RequestId
    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    index: int = 0
    prompt: PromptLogprobs | None = None


class Finished(Message, tag="finished"):
    """The terminal message of sample `index` of a request, with its last tokens; a request has `n` samples.

    `error` is set if and only if reason is "error"; then, and when a request is refused, it ends all samples at once.
    `pooled` is what a request with `pooling` asked for: one row of numbers, or one for each token of its prompt.
    """

    request_id: RequestId
    start: int
    token_ids: list[int]
    reason: FinishReason
    stop_token: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    index: int = 0
    cumulative_logprob: float | None = None
    prompt: PromptLogprobs | None = None
    pooled: Pooled | None = None


class OutputBatch(Message, tag="outputs"):
    epoch: int
    outputs: list[Tokens | Finished]


class Heartbeat(Message, tag="heartbeat"):
    epoch: int
    step: int


class Stats(Counts, tag="stats"):
    """The engine's gauges and counters; counters run from its start. Blocks exclude the null block.

    `cached_tokens` of the `prompt_tokens` were in the cache, `host_hits` of them on the host only. Of `cache_queries`
    tokens looked up on the device, `host_queries` were not there and looked up on the host. `ended_by` counts requests
    by the reason for which their last sample ended. `blocks` is None unless the engine follows some of its blocks.
    `life` counts the engines at this address, `generation` the worker groups of this one. `recovering` says why a group
    is being replaced, and is empty while one serves. `lost_s` is the time without workers, of all `restarts` together;
    by these `recovered_requests` went on, `poisoned_requests` were ended because they had killed workers. State slots
    are those of recurrent layers: sequences hold some, others have states that can be found. `state_missing_tokens` had
    their KV in the cache, but no state that they could be gone on from. `expert_tokens` has for each layer how many
    tokens each of its experts got, up to half a second ago; None unless that is counted. `is_paused` as by
    PauseGeneration; `sleep_level` as by Sleep, None if awake; `model` is the folder whose weights are served, or will
    be after the sleep. `running_adapters` and `waiting_adapters` are the names of the LoRA adapters of such requests.
    `num_deferred` of those that wait do not wait for room: for their adapter, for workers, for the end of a pause, or
    for others that are tried first. `drafts_by` has the drafts of each method, and `forced` ones of grammars.
    `num_stored_keys` blocks and states can be found on disk; `num_writing_blocks` are on their way there, and so many
    chains were not (`dropped_writes`). `loaded_tokens` came from there; of blocks and states `failed_loads` could not.
    `disk` has what its workers count. `loaded_media` had their vectors from there, `encoded_media` from a tower.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    peak_used_blocks: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    cache_queries: int = 0
    host_queries: int = 0
    host_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    rejected_requests: int = 0
    corrupted_requests: int = 0
    malformed_messages: int = 0
    ended_by: dict[FinishReason, int] = msgspec.field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    requests: RequestHistograms | None = None
    blocks: BlockHistograms | None = None
    life: int = 1
    generation: int = 1
    recovering: str = ""
    restarts: dict[RestartCause, int] = msgspec.field(default_factory=dict)
    recovered_requests: int = 0
    poisoned_requests: int = 0
    lost_s: float = 0.0
    num_state_slots: int = 0
    num_used_state_slots: int = 0
    num_cached_states: int = 0
    saved_states: int = 0
    evicted_states: int = 0
    state_missing_tokens: int = 0
    num_host_states: int = 0
    num_used_host_states: int = 0
    demoted_states: int = 0
    promoted_states: int = 0
    expert_tokens: list[list[int]] | None = None
    is_paused: bool = False
    sleep_level: int | None = None
    model: str = ""
    running_adapters: list[str] = msgspec.field(default_factory=list)
    waiting_adapters: list[str] = msgspec.field(default_factory=list)
    num_deferred: int = 0
    drafts_by: dict[str, DraftCounts] = msgspec.field(default_factory=dict)
    num_stored_keys: int = 0
    num_writing_blocks: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    dropped_writes: int = 0
    disk: TierUsage | None = None
    encoded_media: int = 0
    loaded_media: int = 0

    @property
    def rests(self) -> bool:
        """Whether nothing is computed because somebody wants that."""
        return self.is_paused or self.sleep_level is not None


class AdmissionState(Message):
    """Whether a request may come in, and the numbers behind that, in KV blocks.

    verdict      OK: it runs, or fits now. LATER: it fits once others have left. One that never fits is refused at once
    reason       what it waits for: a trace's code for that, or "waits_for_turn" behind others in the queue,
                 "waits_for_step" if the next step takes it in, "waits_for_result" if it was preempted while its latest
                 token was computed, "waits_for_workers" while they are replaced, "waits_for_resume" while the
                 engine is paused or asleep, or empties itself for that; None if it runs
    required     blocks it needs to come in, less those found in the cache that others hold; of one that runs, what it
                 holds. As long as others stand before it nothing has been looked up, so this is the most it can be
    free         blocks that can be handed out, cached ones that nobody holds included
    watermark    of which so many are kept for those that run
    total        blocks of the pool
    """

    verdict: Literal["OK", "LATER", "NEVER"]
    reason: str | None
    required: int
    free: int
    watermark: int
    total: int


class SampleState(Message):
    """The state of one sample. `place` counts those before it in the queue; None if it runs.

    `num_computed` counts positions, of the prompt and behind it, whose KV is or is being computed; `num_blocks` and
    `num_host_blocks` what it holds, shared ones included.
    """

    index: int
    status: Literal["waiting", "running", "preempted", "swapped"]
    place: int | None
    num_computed: int
    num_output: int
    num_blocks: int
    num_host_blocks: int


class RequestContent(Message):
    """Contents of a live request. `output` holds the tokens of its first sample so far; `logprobs` are those of the
    last `len(logprobs)` of them. The engine keeps logprobs of requests with an external id and one sample, and forgets
    those of a request that come to be too many."""

    params: SamplingParams
    prompt: TokenBytes
    output: TokenBytes
    logprobs: list[TokenLogprobs]
    adapter: str = ""


class RequestState(Message):
    """The state of a live request. `admission` is that of its first sample that waits, or of the first one.

    `num_unforked` samples are forked once the prompt is computed. `age_s` counts from its arrival, `deadline_in_s` to
    the moment at which it is ended. `num_ended_output` counts tokens of samples that have ended.
    """

    request_id: str
    admission: AdmissionState
    samples: list[SampleState]
    num_unforked: int
    num_prompt: int
    num_cached: int
    num_preemptions: int
    priority: int
    age_s: float
    deadline_in_s: float | None
    num_ended_output: int = 0
    context: bytes = b""
    content: RequestContent | None = None


class EndedRequest(Message):
    """A request that has ended while another one with the same external id is live."""

    context: bytes
    num_prompt: int
    num_output: int
    priority: int


class Descriptions(Message, tag="descriptions"):
    """The live requests that were asked for, each once: in the order of their ids, then those with the external id.

    `ended` are earlier requests with that external id, as long as one of them is live and the engine has room for them.
    """

    requests: list[RequestState]
    ended: list[EndedRequest] = msgspec.field(default_factory=list)


class PrefixCacheReset(Message, tag="prefix_cache_reset"):
    """Counts the cached blocks that were forgotten, and the live sequences whose blocks will not be found."""

    num_blocks: int
    num_host_blocks: int
    num_live: int


FromClient = (
    Hello
    | Generate
    | ForkRequest
    | Abort
    | Ping
    | GetStats
    | Describe
    | Look
    | FindExternal
    | AbortExternal
    | ResetPrefixCache
    | Operation
    | LoadAdapter
    | UnloadAdapter
)
ToClient = (
    Welcome
    | Refused
    | Dying
    | Recovering
    | Recovered
    | OutputBatch
    | Heartbeat
    | Stats
    | Descriptions
    | Seen
    | ExternalFound
    | ExternalAborted
    | PrefixCacheReset
    | OperationDone
    | AdapterList
    | AdapterAnswer
)
