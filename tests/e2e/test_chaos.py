"""tests/acceptance/chaos.py for a few seconds: processes die and hang under a mixed load; every stream gets its tokens.

Run it from the command line for longer. tests/unit/test_chaos.py shows that the script finds errors.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance import chaos
from tests.acceptance.chaos_report import Options
from tests.acceptance.chaos_specs import References, make_references
from tests.deadlines import scaled

SECONDS, SEED = 4.0, 14
PER_KIND, LONGEST, NUM_STREAMS = 3, 160, 6


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, for sockets."""
    made = tempfile.mkdtemp(prefix="vc", dir="/tmp")
    yield Path(made)
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def references(tiny_checkpoint: Path) -> References:
    return make_references(str(tiny_checkpoint), SEED, PER_KIND, LONGEST)


def test_every_stream_gets_its_tokens(tiny_checkpoint: Path, folder: Path, references: References) -> None:
    options = Options(
        seconds=SECONDS,
        seed=SEED,
        model=str(tiny_checkpoint),
        tensor_parallel_size=2,
        kinds=["kill-worker", "kill-engine", "kill-client", "pause-worker", "slow-engine", "kill-both"],
        heartbeat_timeout_s=scaled(3.0),
        stream_s=scaled(60.0),
        every_s=0.3,
        per_kind=PER_KIND,
        longest=LONGEST,
        num_streams=NUM_STREAMS,
    )
    report = chaos.run(options, folder, references)
    assert report.is_good, "\n".join(report.examples)
    assert sum(report.restarts.values()) > 0, "nobody died"
    assert sum(report.streams.values()) > 0, "no stream ended"
