"""Client <-> engine: LoRA adapters that come and go while the engine runs."""

from typing import Annotated

from msgspec import Meta

from vllm_lite.protocol import Message

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapter(Message, tag="load_adapter"):
    """Load the LoRA adapter in the folder `path` of the engine's host under a name, which requests may use from now on;
    answered by AdapterAnswer once it is there. With `in_place` it takes the place of one that has the name; without,
    it must be the same one, which is then answered as loaded. `parent`: what lists call its base model. `question` is
    a number of the client's, for the answer."""

    question: int
    name: AdapterName
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    in_place: bool = False
    parent: Annotated[str, Meta(max_length=256)] | None = None


class UnloadAdapter(Message, tag="unload_adapter"):
    """Forget an adapter; requests that have it go on. Answered by AdapterAnswer."""

    question: int
    name: AdapterName


class AdapterInfo(Message):
    """An adapter that requests may name. `parent`: its base model's name, None: the model's."""

    name: str
    path: str
    parent: str | None = None


class AdapterList(Message, tag="adapter_list"):
    """All adapters; sent to all clients when one has come or gone."""

    adapters: tuple[AdapterInfo, ...]


class AdapterAnswer(Message, tag="adapter_answer"):
    """The adapter is loaded, or unloaded; or `error` says in one sentence why not. `is_missing`: there is none of that
    name, or at that path. Answers come in any order."""

    question: int
    name: str
    error: str | None = None
    is_missing: bool = False
