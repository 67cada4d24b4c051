"""Chooses the executor that runs an engine's steps. This is the one place that reads the configuration for that, so
that another kind of executor is added here and nowhere else.

MultiprocExecutor starts its workers as processes of this host, or as threads with --single-process; RayExecutor starts
them on the hosts of a Ray cluster. SimulatedExecutor
is never chosen here: it runs on a clock that its caller moves, so its caller makes it.
"""

from vllm_lite.executor.base import Executor
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.process_settings import EngineSettings


def select(settings: EngineSettings, generation: int) -> Executor:
    """An executor whose workers have not been started yet. `generation` counts the groups of workers of this engine.

    Raises EngineError if the address at which they report is taken, ConfigError if there is no Ray cluster.
    """
    own_process = not settings.config.single_process
    backend = settings.config.distributed_executor_backend
    name = f"{settings.life}.{generation}"  # of its own, for the group that it replaces may still have to be removed
    address = f"ipc://{settings.run_dir}/workers-{name}" if own_process else f"{settings.address}-workers-{name}"
    folder = f"{settings.run_dir}/group-{name}"
    if backend == "ray":
        from vllm_lite.executor.ray.executor import RayExecutor  # importing ray takes a second

        return RayExecutor(settings.config, address, generation, settings.worker_module, folder)
    return MultiprocExecutor(settings.config, address, generation, settings.worker_module, group_folder=folder)
