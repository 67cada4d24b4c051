"""Engine <-> worker outside the step: start, heartbeats, adapters, profiles, end.

worker: WorkerHello, Imported -> engine: (refuses another version or model by closing) Load -> worker: Ready ->
engine: Start -> worker: Started -> steps, adapters ... -> engine: Shutdown. A worker that cannot continue sends Failed
and exits.

Every message of a worker has its rank and the generation of its group; the engine drops those of another generation.
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
    """A worker on standby has finished its imports, so that it can start to load at once."""

    rank: int
    generation: int


class Load(Message, tag=37):
    """Load the model. Before this message a worker only imports its modules and waits, since the group that it will
    replace may still use the memory.

    `model` is the checkpoint's folder; None: the one in the worker's settings.
    """

    generation: int
    model: str | None = None


class KVGroupInfo(Message):
    """One KV group: its kind ("full", "sliding"), number of layers, and window in tokens (None: full attention)."""

    kind: str
    num_layers: int
    window: int | None = None


class Ready(Message, tag=31):
    """The shard is loaded; `num_blocks` KV blocks of `block_bytes` bytes fit (null block included). A model with
    recurrent layers has `num_state_slots` of `state_bytes` bytes beside them, unused slot 0 included, and room for
    `num_host_states` on the host, whose ids follow those of the slots. `placeholders` and `kernels` are those of
    Welcome. Contents of media have `media_token_bytes` bytes per token, or at most that if `media_bytes_vary`; each
    vector has `media_vector_bytes`. `whole_media`: no step may end inside a medium, since its tokens attend to each
    other in both directions."""

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
    """Allocate the KV pools: device block ids are [0, num_blocks), host ids [num_blocks, + num_host_blocks).

    `generation` is the number of the worker group; every step and result of this group carries it.
    """

    generation: int
    num_blocks: int
    num_host_blocks: int


STEP_ROWS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128
"""Upper bounds of the row counts that are taken to cost alike, apart from a cost per row; larger steps share the last
one. Workers time steps of these rows."""


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """Measured time of a decode step. `num_rows`: tokens that it computed, drafts included; `most_drafts`: maximum
    number of drafts of a sequence."""

    num_rows: int
    most_drafts: int
    took_s: float


class Started(Message, tag=33):
    """The pools are allocated; `swap_blocks_per_s` is the measured rate between them, 0 without a host pool. `timings`
    are of steps with and without drafts, if they decide the number of drafts."""

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
    """Drop an adapter, which no step uses any more."""

    number: int


class AdapterRead(Message, tag=41):
    """The adapter is loaded, or `error` is the reason why not, in one sentence; the worker then continues without it.
    `is_missing`: there is no adapter at that path. `digest` is that of its files, with a disk tier."""

    rank: int
    generation: int
    number: int
    error: str | None = None
    is_missing: bool = False
    digest: bytes = b""


class BeginProfile(Message, tag=42):
    """Profile the steps from now on; every rank answers with Profiled."""


class EndProfile(Message, tag=43):
    """End the profile and write it; every rank answers with Profiled."""


class Profiled(Message, tag=44):
    """The profile has begun, or is written; or `error` is the reason why not, in one sentence."""

    rank: int
    generation: int
    error: str | None = None


class WorkerHeartbeat(Message, tag=34):
    """Sign of life. `progress` grows with every computed layer and loaded shard; it does not if the worker hangs.

    `waiting`: the worker waits for another rank, or for the engine's next message. `expert_tokens`, from rank 0 if they
    are counted: tokens per layer and expert since the worker's start; None if they have not changed.
    """

    rank: int
    generation: int
    progress: int
    waiting: bool
    expert_tokens: list[list[int]] | None = None


class Failed(Message, tag=35):
    """The worker cannot continue. `kind` is the error's class; `bad_input`: the user's model or config is at fault.

    `waited_for`: the rank whose end made this one, which has no fault of its own, leave a wait.
    """

    rank: int
    generation: int
    kind: str
    message: str
    bad_input: bool
    waited_for: int | None = None


class Shutdown(Message, tag=36):
    pass
