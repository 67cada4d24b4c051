"""Runs a program of this package whose engines have light workers: `python -m tests.e2e.light PROGRAM ARGUMENTS...`,
where PROGRAM is a module or a file.

For tests of everything around a model: ports, signals, limits, and which process notices which failure.
"""

import runpy
import sys
from functools import partial

from tests.e2e import light_worker
from vllm_lite.client.engines import launch
from vllm_lite.process_settings import EngineSettings
from vllm_lite.tools import cli


def main() -> None:
    launch.EngineSettings = partial(EngineSettings, worker_module=light_worker.__name__)  # type: ignore[attr-defined,assignment]
    cli.ENGINE_EARLY = cli.ENGINE  # which starts no worker before it has its settings
    sys.argv = sys.argv[1:]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    run(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
