"""Engine <-> worker outside the step: the start-up conversation, heartbeats, the end.

worker: WorkerHello, Imported -> engine: (refuses another version or model by closing) Load -> worker: Ready ->
engine: Start -> worker: Started -> steps, adapters ... -> engine: Shutdown. A worker that cannot go on sends Failed
and exits.

Every message of a worker names its rank and the generation of its group; the engine drops those of another generation.
"""

import msgspec

from vllm_lite.protocol import Message
from vllm_lite.protocol.pooling import PoolerInfo


class WorkerHello(Message, tag=30):
    version: int
    model: str
    rank: int
    generation: int
    pid: int


class Imported(Message, tag=38):
    """A worker that is to replace another one has imported what it needs: once it may load, that is all it does."""

    rank: int
    generation: int


class Load(Message, tag=37):
    """Load the model. Until it comes a worker imports what it needs and waits: its memory may still be taken by a group
    that it is to replace.

    `model` is the folder of the checkpoint, None: the one in the worker's settings.
    """

    generation: int
    model: str | None = None


class KVGroupInfo(Message):
    """One attention group: its kind ("full", "sliding"), layers, and window in tokens (None = everything)."""

    kind: str
    num_layers: int
    window: int | None = None


class Ready(Message, tag=31):
    """The shard is loaded; `num_blocks` KV blocks of `block_bytes` would fit (null block included). A model with
    recurrent layers has `num_state_slots` of `state_bytes` beside them, slot 0 included, which is never used, and room
    for `num_host_states` in host memory, whose ids follow those of the slots. `placeholders` as in Welcome; the
    contents of media have `media_token_bytes` for each of their tokens, or at most so many where `media_bytes_vary`,
    and their vectors `media_vector_bytes`. `whole_media`: no step may end inside a medium, since its tokens see each
    other both ways. `kernels` as in Welcome."""

    rank: int
    generation: int
    num_blocks: int
    block_bytes: int
    groups: tuple[KVGroupInfo, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pooler: PoolerInfo = PoolerInfo()
    num_state_slots: int = 0
    state_bytes: int = 0
    num_host_states: int = 0
    placeholders: dict[str, int] = msgspec.field(default_factory=dict)
    media_token_bytes: int = 0
    media_bytes_vary: bool = False
    whole_media: bool = False
    media_vector_bytes: int = 0
    kernels: dict[str, str] = msgspec.field(default_factory=dict)


class Start(Message, tag=32):
    """The engine's decision: device block ids are [0, num_blocks), host ids [num_blocks, + num_host_blocks).

    `generation` counts the lives of the engine's worker group; every step of this life carries it, both ways.
    """

    generation: int
    num_blocks: int
    num_host_blocks: int


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """The time of a decode step that a worker has tried. `num_rows`: the tokens that it computed, drafts included;
    `most_drafts`: of any sequence."""

    num_rows: int
    most_drafts: int
    took_s: float


class Started(Message, tag=33):
    """The pools are there; `swap_blocks_per_s` was measured between them, 0 without a host pool. `timings`: of steps
    with drafts and without, if their time decides how much is drafted."""

    rank: int
    generation: int
    swap_blocks_per_s: float = 0.0
    timings: tuple[StepTiming, ...] = ()


class ReadAdapter(Message, tag=39):
    """Read the LoRA adapter in the folder `path`; every rank answers with AdapterRead. Steps sent later may use it."""

    number: int
    name: str
    path: str


class DropAdapter(Message, tag=40):
    """Forget an adapter; no step has it any more."""

    number: int


class AdapterRead(Message, tag=41):
    """The adapter is there, or `error` says in one sentence why it cannot be; then the worker goes on without it.
    `is_missing`: there is no adapter at that path at all. `digest` is that of its files, where KV is kept on disk."""

    rank: int
    generation: int
    number: int
    error: str | None = None
    is_missing: bool = False
    digest: bytes = b""


class BeginProfile(Message, tag=42):
    """Profile the steps that come from now on; every rank answers with Profiled."""


class EndProfile(Message, tag=43):
    """End that, and write what was found; every rank answers with Profiled."""


class Profiled(Message, tag=44):
    """The profile has begun, or is written; or `error` says in one sentence why not, and the worker goes on."""

    rank: int
    generation: int
    error: str | None = None


class WorkerHeartbeat(Message, tag=34):
    """`progress` grows with every layer computed and every shard loaded: a hung worker's stands still.

    `waiting`: at this moment it waits for another rank, or for the engine's next message. `expert_tokens`, of rank 0
    and where they are counted: for each layer how many tokens each of its experts has got since the worker's start;
    None if these are no others than before.
    """

    rank: int
    generation: int
    progress: int
    waiting: bool
    expert_tokens: list[list[int]] | None = None


class Failed(Message, tag=35):
    """The worker cannot go on. `kind` is the error's class; `bad_input`: the user's model or config is at fault.

    `waited_for`: nothing is wrong with this rank, it left a wait because that other one had ended.
    """

    rank: int
    generation: int
    kind: str
    message: str
    bad_input: bool
    waited_for: int | None = None


class Shutdown(Message, tag=36):
    pass
