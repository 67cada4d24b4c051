"""A worker process that reaches its engine over tcp, with keys or in the clear: a whole conversation, model aside."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.fakes import DEADLINE_S
from vllm_lite import transport
from vllm_lite.config import EngineConfig, ResolvedConfig
from vllm_lite.errors import EngineDeadError, EngineError
from vllm_lite.executor import blocking
from vllm_lite.executor.multiproc import MultiprocExecutor, WorkerTcp
from vllm_lite.executor.select import select
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol.codec import unpack_tokens
from vllm_lite.protocol.step import Continue, ModelOutput, SchedulerOutput
from vllm_lite.transport import Tcp
from vllm_lite.transport.keys import make_client_keys, make_engine_keys

GENERATION = 5
STUB_WORKER = "vllm_lite.tools.bench.stub_worker"
ANY = "tcp://127.0.0.1:*"


@pytest.fixture
def config() -> ResolvedConfig:
    settings = {"device": "cpu", "load_format": "dummy"}
    return EngineConfig.check(settings).resolve(max_position_embeddings=64, dtype="float32", model_path="stub")


def answer(executor: MultiprocExecutor) -> ModelOutput:
    executor.submit(SchedulerOutput(GENERATION, 1, [], [Continue(0, 1, [])]))
    while (output := executor.poll()) is None:
        assert transport.wait(DEADLINE_S, executor)
    return output


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_worker_process_serves_over_tcp(config: ResolvedConfig, tmp_path: Path, with_keys: bool) -> None:
    worker_keys = None
    if with_keys:
        make_engine_keys(tmp_path)
        worker_keys = str(make_client_keys(tmp_path, "worker"))
    tcp = WorkerTcp(Tcp(ANY, tmp_path if with_keys else None), worker_keys)
    address = f"ipc://{tmp_path}/w"
    with closing(MultiprocExecutor(config, address, GENERATION, STUB_WORKER, tcp)) as executor:
        assert blocking.load(executor, DEADLINE_S).num_blocks == 4096
        blocking.allocate(executor, 16, 0, DEADLINE_S)
        output = answer(executor)
    assert (output.generation, output.step, unpack_tokens(output.tokens)) == (GENERATION, 1, [1])


def test_a_worker_without_the_keys_is_not_let_in(config: ResolvedConfig, tmp_path: Path) -> None:
    make_engine_keys(tmp_path)
    tcp = WorkerTcp(Tcp(ANY, tmp_path), None)
    with closing(MultiprocExecutor(config, f"ipc://{tmp_path}/w", GENERATION, STUB_WORKER, tcp)) as executor:
        with pytest.raises(EngineError, match="worker 0 is not ready") as caught:
            blocking.load(executor, 0.5)
        assert not isinstance(caught.value, EngineDeadError)


def test_the_configuration_chooses_the_executor(config: ResolvedConfig, tmp_path: Path) -> None:
    with closing(select(EngineSettings(config, f"ipc://{tmp_path}/c", str(tmp_path)), 1)) as executor:
        assert isinstance(executor, MultiprocExecutor)
        assert (tmp_path / "workers-1.1").exists(), "its workers report in the engine's private folder"
