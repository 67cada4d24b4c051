"""Engines that tests launch in their own process, perhaps with entry points that fail on purpose.

Nothing of one is left in the end: no process, and no file below the TMPDIR that all of them have.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.e2e import failing_worker, kill_plan, killed_worker, poisoned_worker
from tests.e2e.test_processes import assert_nothing_left, family
from vllm_lite import EngineConfig
from vllm_lite.client.engines import launch
from vllm_lite.client.engines.launch import LaunchedEngine
from vllm_lite.process_settings import EngineSettings

VARIABLES = (failing_worker.VARIABLE, kill_plan.VARIABLE, killed_worker.LIGHT, poisoned_worker.VARIABLE)
"""Environment variables that such entry points read. An engine has only the ones that it is given: other engines may
run at the same time."""


@contextmanager
def launched(
    model: Path,
    environment: Mapping[str, str] | None = None,
    *,
    engine_module: str = launch.ENGINE_MODULE,
    worker_module: str = "vllm_lite.worker.process",
    **settings: Any,
) -> Iterator[LaunchedEngine]:
    """An engine of `model` in float32 on one thread, unless `settings` say otherwise."""
    plain: dict[str, Any] = {"model": str(model), "device": "cpu", "cpu_threads": 1, "dtype": "float32"}
    plain["heartbeat_timeout_s"] = scaled(60.0)  # killed processes are gone by then; no other one may count as hung
    run_root = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short, for sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(run_root))
        patch.setenv("TMPDIR", str(run_root))
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        patch.setattr(launch, "ENGINE_MODULE", engine_module)
        patch.setattr(launch, "EngineSettings", partial(EngineSettings, worker_module=worker_module))
        engine = launch.launch(EngineConfig.check(plain | settings))
        pids = family(engine.pid) if engine.pid != os.getpid() else []
        try:
            yield engine
        finally:
            pids += family(engine.pid) if engine.pid != os.getpid() else []
            engine.close()
    assert_nothing_left(pids, run_root)
    run_root.rmdir()
