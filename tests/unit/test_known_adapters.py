"""The adapters that a client knows, while an engine takes the place of another one."""

from vllm_lite.client.engines.known_adapters import KnownAdapters
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, LoadAdapter


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name, f"/{name}", "base")


def test_the_engine_says_which_there_are() -> None:
    known = KnownAdapters([info("a")])
    known.on_list([info("b"), info("c")])
    assert list(known.by_name) == ["b", "c"]


def test_all_keep_their_names_while_the_next_engine_loads_them() -> None:
    known = KnownAdapters([info("a"), info("b"), info("c")])
    asked = known.load_again([info("a")])
    assert asked == [LoadAdapter(0, name, f"/{name}", parent="base") for name in ("b", "c")]
    known.on_list([info("a"), info("b")])  # the first of them is there, the second is on its way
    known.on_answer(AdapterAnswer(0, "b"))
    assert sorted(known.by_name) == ["a", "b", "c"]
    known.on_answer(AdapterAnswer(0, "c", "its folder is gone"))
    assert sorted(known.by_name) == ["a", "b"]
    known.on_list([info("a")])
    assert list(known.by_name) == ["a"], "an adapter that was unloaded is still known"


def test_answers_to_others_change_nothing() -> None:
    known = KnownAdapters([info("a")])
    known.load_again([])
    known.on_answer(AdapterAnswer(3, "a", "the name is taken"))
    assert list(known.by_name) == ["a"]
