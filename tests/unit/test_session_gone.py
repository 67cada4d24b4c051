"""A session whose engine's launcher has ended: no other engine will start, and the session knows that at once."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.deadlines import scaled
from tests.fakes import DEADLINE_S, FakeEngine, Sink, session_with, start
from vllm_lite.client.engines.connection import RUN_DIR
from vllm_lite.client.streams.stream import StreamFailure


@pytest.mark.parametrize("is_private", [True, False])
def test_none_is_waited_for_where_the_launcher_has_removed_its_folder(is_private: bool) -> None:
    """A folder that a user has chosen may be made again."""
    folder = Path(tempfile.mkdtemp(prefix=RUN_DIR if is_private else "mine-"))
    engine = FakeEngine(address=f"ipc://{folder}/engine")
    with session_with(engine, recovery_timeout_s=DEADLINE_S if is_private else scaled(0.2)) as session:
        sink = Sink()
        start(session, engine, "a", sink)
        engine.die()
        shutil.rmtree(folder)
        end = sink.next()
        assert isinstance(end, StreamFailure)
        why = f"nothing listens at {engine.address} any more" if is_private else "no other engine took its place"
        assert why in str(end.error)
