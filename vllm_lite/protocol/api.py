"""Client <-> engine. Token ids are little-endian u32 bytes (`array('I')`); clients choose the ids of their requests.

A client sends Hello and gets Welcome or Refused. After that every Generate is answered by any number of Tokens and
exactly one Finished per sample, or one Finished with an error, such as a rejection, that ends all samples; both inside
OutputBatch.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_lite.protocol import Message
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, AdapterList, LoadAdapter, UnloadAdapter
from vllm_lite.protocol.encoder import MediaContent
from vllm_lite.protocol.external import AbortExternal, ExternalAborted, ExternalFound, ExternalId, FindExternal
from vllm_lite.protocol.operations import Operation, OperationDone
from vllm_lite.protocol.params import MAX_SAMPLES, SamplingParams
from vllm_lite.protocol.pooling import MAX_POOLED_BYTES, PoolerInfo, Pooling
from vllm_lite.protocol.spans import MAX_MEDIA, PromptMedia
from vllm_lite.protocol.stats import FinishReason, Stats
from vllm_lite.protocol.view import Look, Seen

MAX_PROMPT_BYTES = 16 * 1024 * 1024
"""Four million tokens of four bytes."""
MAX_CONTEXT_BYTES, MAX_MARKS = 64 * 1024, 4096

MAX_ID_CHARS = 256
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Context = Annotated[bytes, Meta(max_length=MAX_CONTEXT_BYTES)]
TokenBytes = Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)]
Pooled = Annotated[bytes, Meta(max_length=MAX_POOLED_BYTES)]
"""Numbers as little-endian float32."""


# ---- client -> engine


class Hello(Message, tag="hello"):
    """First message of a client. `model=None` accepts any model."""

    version: int
    model: Annotated[str, Meta(max_length=4096)] | None = None


class SampleSoFar(Message):
    """An unfinished sample of a request, with the output tokens that the client has."""

    index: Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)]
    output: TokenBytes = b""


class Generate(Message, tag="generate"):
    """Start a request, or attach to it again. Idempotent: if the engine knows `request_id`, with the same prompt and
    parameters, the stream continues to this client from output token `have`, and a stream to another client ends with
    an error. Otherwise `output` (empty, or exactly `have` token ids) was generated before, and generation continues
    after it.

    For a request with several samples, `samples` has the same for each sample that has not ended; all others have
    ended, and `have` and `output` are empty. Without `samples` all samples begin after the prompt. `num_scored` is the
    number of prompt tokens whose logprobs the client has; they are not sent again.

    `marks` are ascending token positions in the prompt where later prompts are likely to diverge, such as ends of
    messages. Recurrent layers save states there; other models can reuse a prompt up to a mark inside a block.
    `external_id` is the id by which users know the request; the prompts of one HTTP body share one. Any client may use
    it in Describe and AbortExternal. `context` is opaque to the engine, which returns it in Descriptions. `adapter` is
    the name of a loaded LoRA adapter; empty: none.

    With `pooling` nothing is generated: the request ends once its prompt is computed, and its Finished has the result.
    Of `params` only user, salt, deadline and priority count.

    `media` are in order and do not overlap; `prompt` has placeholders there. `contents` is the encoder's input.
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


class GetPrefix(Message, tag="get_prefix"):
    """Ask which blocks of the prompt of `request` are cached, without starting it; answered by PrefixSeen."""

    request: Generate


class ForkRequest(Message, tag="fork"):
    """Start a new request `child_id` that continues after the first `have` output tokens of a live one, sharing its KV
    and its adapter.

    Its stream begins at token `have`, with its own seed (`params.seed`). `external_id` and `context` are those of the
    new request, as in Generate.
    """

    request_id: RequestId
    child_id: RequestId
    have: Annotated[int, Meta(ge=0)]
    params: SamplingParams
    external_id: ExternalId = ""
    context: Context = b""


class Abort(Message, tag="abort"):
    """End a request of this client, or only its `samples`; no `samples` means all. Other clients' requests are ignored.

    Each sample that is still open gets its Finished, and with the last one the request ends. Beams only end together:
    naming some of them has no effect. `stopped`: the client has all it wanted, such as a stop string; only metrics show
    the difference.
    """

    request_id: RequestId
    stopped: bool = False
    samples: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_SAMPLES)], ...], Meta(max_length=MAX_SAMPLES)] = ()


class Ping(Message, tag="ping"):
    """Ask for a Heartbeat at once, which shows that the engine's loop is running."""


class GetStats(Message, tag="get_stats"):
    pass


class Describe(Message, tag="describe"):
    """Ask for the state of requests of any client: those with these ids, and all with an external id. Answered by one
    Descriptions. For a single request, `with_content` also returns its parameters, tokens and logprobs."""

    request_ids: Annotated[tuple[RequestId, ...], Meta(max_length=1024)] = ()
    external_id: ExternalId = ""
    with_content: bool = False


class ResetPrefixCache(Message, tag="reset_prefix_cache"):
    """Empty the prefix cache, on the device and on the host; answered by PrefixCacheReset.

    Later requests find nothing that was computed before, except on disk; `stored` empties the disk tier as well. Live
    requests keep their KV.
    """

    stored: bool = False


# ---- engine -> client


class Welcome(Message, tag="welcome"):
    """The engine is ready to serve. `max_model_len` is the length of a request that the KV pool can really hold.
    `tokenizer` is the tokenizer's folder on the engine's host, for clients that know only an address. If the engine
    dies, another one replaces it if `is_supervised`; otherwise all requests end. `max_loras`: maximum number of
    different LoRA adapters in a step; 0: none are served. `wants_marks`: ends of messages are useful as marks of a
    Generate. `kv_tokens`: tokens whose KV the pool holds in all KV groups, 0 for a model that keeps none;
    `kv_requests`: requests of max_model_len whose KV it holds at once. `placeholders`: kind of media -> placeholder
    token id, for each kind that the model takes. `kernels`: part of the model -> the kernels that compute it, for
    people."""

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
    kv_tokens: int = 0
    kv_requests: float = 0.0
    placeholders: dict[str, int] = msgspec.field(default_factory=dict)
    kernels: dict[str, str] = msgspec.field(default_factory=dict)


class Refused(Message, tag="refused"):
    """The handshake failed for this reason; nothing else will be answered.

    `bad_input`: the engine cannot start because its model or configuration is at fault.
    """

    reason: str
    bad_input: bool = False


class Dying(Message, tag="dying"):
    """The engine ends for this reason. `is_final`: all requests end. Otherwise another engine is about to replace it at
    the same address."""

    reason: str
    is_final: bool = True


class Recovering(Message, tag="recovering"):
    """The workers are being replaced, for the `attempt`-th time in a row. Streams pause, and later continue with the
    same tokens. Sent to all clients; Recovered or Dying follows."""

    epoch: int
    reason: str
    attempt: int


class Recovered(Message, tag="recovered"):
    """The workers of `generation` serve, after a pause of `lost_s` seconds."""

    epoch: int
    generation: int
    lost_s: float


class TokenLogprobs(Message):
    """One sampled token: its raw log-softmax, its rank (1 = most likely), and the top (id, logprob) pairs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(Message):
    """Logprobs of the prompt tokens from index `start` on; the first one, index 0, has none. May be sent again."""

    start: int
    entries: list[TokenLogprobs]


class Tokens(Message, tag="tokens"):
    """Output tokens `start .. start + len(token_ids)` of sample `index` of a request, which is not complete.

    `prompt`, if requested, is sent in pieces, in order, before or with the first token of sample 0.
    """

    request_id: RequestId
    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    index: int = 0
    prompt: PromptLogprobs | None = None


class Finished(Message, tag="finished"):
    """The terminal message of sample `index` of a request, with its last tokens; a request has `n` samples.

    `error` is set if and only if the reason is "error"; then it ends all samples of the request. `pooled` is the result
    of a request with `pooling`: one row of numbers, or one row per token of its prompt. `queued_s` is the time from the
    request's arrival to its admission.
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
    queued_s: float | None = None


class OutputBatch(Message, tag="outputs"):
    epoch: int
    outputs: list[Tokens | Finished]


class Heartbeat(Message, tag="heartbeat"):
    epoch: int
    step: int


class AdmissionState(Message):
    """Verdict on the admission of a request, with its numbers in KV blocks.

    verdict      OK: it runs, or fits now. LATER: it fits once others have ended. One that never fits is refused at once
    reason       reason for waiting: a trace's code, or "waits_for_turn" behind others in the queue, "waits_for_step" if
                 the next step can admit it, "waits_for_result" if it was preempted while its latest token was
                 computed, "waits_for_workers" while they are replaced, "waits_for_resume" while the engine is paused,
                 asleep or about to be; None if it runs
    required     blocks needed for admission, without cached ones that others hold; for a running request the blocks
                 that it holds. Behind other requests nothing has been looked up yet, so this is an upper bound
    free         blocks that can be allocated, unreferenced cached ones included
    watermark    free blocks that are reserved for running requests
    total        blocks of the pool
    """

    verdict: Literal["OK", "LATER", "NEVER"]
    reason: str | None
    required: int
    free: int
    watermark: int
    total: int


class SampleState(Message):
    """State of one sample. `place` is the number of samples before it in the queue; None if it runs.

    `num_computed` is the number of positions, in prompt and output, whose KV is or is being computed; `num_blocks` and
    `num_host_blocks` are the blocks that it holds, shared ones included.
    """

    index: int
    status: Literal["waiting", "running", "preempted", "swapped"]
    place: int | None
    num_computed: int
    num_output: int
    num_blocks: int
    num_host_blocks: int


class RequestContent(Message):
    """Contents of a live request. `output` has the tokens of its first sample so far; `logprobs` are those of the last
    `len(logprobs)` of them. The engine keeps logprobs of requests with an external id and one sample, and drops those
    of a request that become too many."""

    params: SamplingParams
    prompt: TokenBytes
    output: TokenBytes
    logprobs: list[TokenLogprobs]
    adapter: str = ""


class RequestState(Message):
    """State of a live request. `admission` is that of its first waiting sample, or of its first sample if none waits.

    `num_unforked` samples are forked once the prompt is computed. `age_s` is the time since its arrival,
    `deadline_in_s` the time until its deadline. `num_ended_output` is the number of tokens of samples that have ended.
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
    """An ended request, another one of whose external id is live."""

    context: bytes
    num_prompt: int
    num_output: int
    priority: int


class Descriptions(Message, tag="descriptions"):
    """The requested live requests, each once: in the order of the given ids, then those with the external id.

    `ended` are ended requests with that external id, as long as another one is live and the engine has room for them.
    """

    requests: list[RequestState]
    ended: list[EndedRequest] = msgspec.field(default_factory=list)


class PrefixCacheReset(Message, tag="prefix_cache_reset"):
    """Numbers of cached blocks that were dropped, and of live sequences whose blocks will not be found."""

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
    | GetPrefix
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
