"""The adapters that a client knows, while an engine takes the place of another one."""

from tests.unit.test_session_recovery import Play
from vllm_lite.client.engines.feature import KnownAdapters
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, AdapterList, LoadAdapter
from vllm_lite.protocol.api import Generate
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.params import SamplingParams


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name, f"/{name}", "base")


def test_the_engines_list_replaces_the_known_adapters() -> None:
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


def test_another_engine_loads_them_before_it_gets_requests() -> None:
    play = Play()
    play.submit(Generate("a", pack_tokens([1, 2]), SamplingParams(max_tokens=9)))
    play.engine.send(AdapterList((info("poems"),)))
    play.until(lambda: "poems" in play.session.adapters)
    engine = play.replaced()
    assert engine.expect(LoadAdapter) == LoadAdapter(0, "poems", "/poems", parent="base")
    assert engine.expect(Generate).request_id == "a"
    assert "poems" in play.session.adapters
    engine.send(AdapterAnswer(0, "poems", "it is gone"))
    play.until(lambda: "poems" not in play.session.adapters)
    play.close()
