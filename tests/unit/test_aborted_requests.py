"""/abort_requests with many ids: of calls on this server, of calls on other servers, and unknown ones."""

from typing import Any

import pytest

from tests.unit.resumable_stage import Stage, asking, settle
from vllm_lite.errors import EngineDeadError
from vllm_lite.server.openai.errors import ApiError


async def test_any_number_of_ids_is_one_question_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("", "gen-", "cmpl-", "chatcmpl-")
    names = [[kind + name for kind in kinds] for name in (*map(str, range(2, 1025)), "x" * 256)]

    stage = Stage()
    stage.start()
    await settle()
    await stage.live.end_first(names, asking(""))
    assert [len(asked) for asked in stage.session.looked_for] == [4 * 1023 + 1], "longer ids have no request"
    assert stage.session.ended_externally == []
    stage.session.external_ids = {"cmpl-7", "chatcmpl-7", "gen-9"}
    await stage.live.end_first([["chatcmpl-1"], *names], asking(""))
    assert len(stage.session.looked_for) == 2
    assert stage.session.ended_externally == ["chatcmpl-1", "cmpl-7", "chatcmpl-7", "gen-9"]

    def replaced(_: Any) -> Any:
        raise EngineDeadError("the engine is being replaced")

    monkeypatch.setattr(stage.session, "abort_external", replaced)
    monkeypatch.setattr(stage.session, "find_external", replaced)
    with pytest.raises(ApiError) as caught:
        await stage.live.end_first([["chatcmpl-2"], ["chatcmpl-1"]], asking(""))
    assert caught.value.status == 503
    assert stage.session.aborted == ["chatcmpl-1"], "what runs here ends all the same"
    await stage.live.end_first([["chatcmpl-1"]], asking(""))
