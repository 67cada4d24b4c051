"""Client <-> engine: loading and unloading LoRA adapters while the engine runs."""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

MAX_NAME_CHARS = 256
AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapter(Message, tag="load_adapter"):
    """Load the LoRA adapter in folder `path` of the engine's host under a name, which requests may use from now on;
    answered by AdapterAnswer once it is loaded. With `in_place` it replaces an adapter of that name. Without, an
    adapter of that name must be the same one, which is answered as loaded. `parent`: name of its base model in lists.
    `question` is a number chosen by the client and repeated in the answer."""

    question: int
    name: AdapterName
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    in_place: bool = False
    parent: Annotated[str, Meta(max_length=256)] | None = None


class UnloadAdapter(Message, tag="unload_adapter"):
    """Unload an adapter; its requests continue. Answered by AdapterAnswer."""

    question: int
    name: AdapterName


class AdapterInfo(Message):
    """An adapter that requests can name. `parent`: name of its base model; None: the served model's."""

    name: str
    path: str
    parent: str | None = None


class AdapterList(Message, tag="adapter_list"):
    """All adapters; sent to all clients when one was loaded or unloaded."""

    adapters: tuple[AdapterInfo, ...]


class AdapterAnswer(Message, tag="adapter_answer"):
    """The adapter was loaded or unloaded; or `error` is the reason why not, in one sentence. `is_missing`: there is no
    adapter of that name, or at that path. Answers come in any order."""

    question: int
    name: str
    error: str | None = None
    is_missing: bool = False
