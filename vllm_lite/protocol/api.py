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
from vllm_lite.protocol.operations import Operation, OperationDone
from vllm_lite.protocol.params import MAX_SAMPLES, SamplingParams
from vllm_lite.protocol.pooling import MAX_POOLED_BYTES, PoolerInfo, Pooling
from vllm_lite.protocol.spans import MAX_MEDIA, PromptMedia
from vllm_lite.protocol.stats import FinishReason, Stats
from vllm_lite.protocol.view import Look, Seen

MAX_PROMPT_BYTES = 16 * 1024 * 1024
"""Room for four million tokens of four bytes."""
MAX_CONTEXT_BYTES, MAX_MARKS = 64 * 1024, 4096

RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Context = Annotated[bytes, Meta(max_length=MAX_CONTEXT_BYTES)]
TokenBytes = Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)]
Pooled = Annotated[bytes, Meta(max_length=MAX_POOLED_BYTES)]
"""Numbers as little-endian float32."""


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
