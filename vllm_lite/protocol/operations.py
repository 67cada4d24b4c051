"""Client -> engine: operations on the engine itself. Each is answered by one OperationDone, when it is done.

While the engine is paused or asleep nothing is computed; requests are still accepted, wait, and can end.
"""

from typing import Annotated, Literal

from msgspec import Meta

from vllm_lite.protocol import Message

PauseMode = Literal["abort", "wait", "keep"]
WakeTag = Literal["weights", "kv_cache", "scheduling"]


class PauseGeneration(Message, tag="pause"):
    """Stop computing until ResumeGeneration; new requests wait. Answered by OperationDone, once nothing is computed.

    `mode` is for the live requests: "abort" ends them; "wait" lets them finish, while new ones are held; "keep" stops
    them, and they continue later after their tokens. `clear_cache`: also empty the prefix cache, except with "keep".
    """

    mode: PauseMode = "abort"
    clear_cache: bool = True


class ResumeGeneration(Message, tag="resume"):
    """Continue after PauseGeneration; a pause, sleep or weight update that still waits for requests is cancelled.
    Answered by OperationDone."""


class Sleep(Message, tag="sleep"):
    """End the workers, so that weights and KV cache take no memory until WakeUp; new requests wait.

    Level 1 keeps processes without a model, which wake faster; level 2 keeps none; level 0 is a pause that WakeUp ends.
    `mode` is that of PauseGeneration. Answered by OperationDone.
    """

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: PauseMode = "abort"


class WakeUp(Message, tag="wake_up"):
    """Start workers once both tags "weights" and "kv_cache" have been sent since the sleep, and continue to compute; no
    `tags` means all. After a sleep of level 0 the workers are still there, and any tag continues at once. "scheduling"
    does nothing else.

    Answered by OperationDone when the workers serve, or at once as long as a tag is missing.
    """

    tags: Annotated[tuple[WakeTag, ...], Meta(max_length=8)] = ()


class UpdateWeights(Message, tag="update_weights"):
    """Serve the weights in folder `model`, which may be the same folder with new files, of the same architecture,
    shapes and vocabulary. The prefix cache is emptied. Answered by OperationDone, when workers serve them.

    `mode` is that of PauseGeneration; kept requests continue after their tokens with the new weights. If the folder
    cannot be served, the answer has the reason, and the previous weights are served again.
    """

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    mode: PauseMode = "wait"


class StartProfile(Message, tag="start_profile"):
    """Let all workers profile their steps from the next one on, by the engine's profiler_config. Answered by
    OperationDone, once they do."""


class StopProfile(Message, tag="stop_profile"):
    """End the profile, and let each worker write its part. Answered by OperationDone, once that is written."""


class OperationDone(Message, tag="operation_done"):
    """The answer to each operation, in the order in which a client sent them.

    `error` is the reason of a failure; `bad_input`: the operation can never be done as requested.
    """

    error: str | None = None
    bad_input: bool = False


Operation = PauseGeneration | ResumeGeneration | Sleep | WakeUp | UpdateWeights | StartProfile | StopProfile
