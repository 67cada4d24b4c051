"""Client -> engine: what concerns the engine itself. Each is answered by one OperationDone, when it is done.

While the engine is paused or asleep nothing is computed; requests come, wait, end and pass their deadlines as ever.
"""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_lite.protocol import Message

PauseMode = Literal["abort", "wait", "keep"]
WakeTag = Literal["weights", "kv_cache", "scheduling"]


class PauseGeneration(Message, tag="pause"):
    """Compute nothing from now on until ResumeGeneration; requests that come wait. Answered by OperationDone, once that
    is so.

    `mode` says what becomes of the requests that are there: "abort" ends them; "wait" lets them end by themselves,
    while those that come later are held; "keep" stops them where they are, and they go on behind the tokens they have.
    `clear_cache`: empty the prefix cache as well, unless they are kept.
    """

    mode: PauseMode = "abort"
    clear_cache: bool = True


class ResumeGeneration(Message, tag="resume"):
    """Compute again after PauseGeneration; one that still waits for requests is called off. Answered by
    OperationDone."""


class Sleep(Message, tag="sleep"):
    """End the workers, so that weights and KV cache take no memory until WakeUp; requests that come wait.

    Level 1 keeps processes that have nothing loaded and wake faster, level 2 keeps none, and level 0 is a pause that
    WakeUp ends. `mode` is that of PauseGeneration. Answered by OperationDone.
    """

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: PauseMode = "abort"


class WakeUp(Message, tag="wake_up"):
    """Have workers load the model and allocate the KV cache once both of these `tags` have been named, and compute
    again; no tags name all. "scheduling" means nothing more: it is what a sleep of level 0 lacks.

    Answered by OperationDone, when they serve, or at once as long as a tag is missing.
    """

    tags: Annotated[tuple[WakeTag, ...], Meta(max_length=8)] = ()


class UpdateWeights(Message, tag="update_weights"):
    """Serve the weights in another folder `model` (or in the same one, written anew) of the same architecture, shapes
    and vocabulary. What was cached is forgotten. Answered by OperationDone, when workers serve them.

    `mode` is that of PauseGeneration; kept requests go on behind their tokens by the new weights. If the folder cannot
    be served the answer says why, and the weights before go on.
    """

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    mode: PauseMode = "wait"


class StartProfile(Message, tag="start_profile"):
    """Have all workers profile their steps from the next one on, as the engine's profiler_config says. Answered by
    OperationDone, once they do."""


class StopProfile(Message, tag="stop_profile"):
    """End that, and have each worker write what it has found. Answered by OperationDone, once it is written."""


class OperationDone(Message, tag="operation_done"):
    """The answer to each of these messages, in the order in which a client sent them.

    `error` says why it was not done; `bad_input`: what was asked for cannot be.
    """

    error: str | None = None
    bad_input: bool = False


Operation = PauseGeneration | ResumeGeneration | Sleep | WakeUp | UpdateWeights | StartProfile | StopProfile
