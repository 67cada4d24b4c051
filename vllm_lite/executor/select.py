"""Chooses the executor of an engine by the configuration. Only this file does, so another kind is added here.

MultiprocExecutor starts its workers as processes of this host, or as threads with --single-process; RayExecutor starts
them on the hosts of a Ray cluster. SimulatedExecutor is never chosen here: its caller advances its clock, and so
creates it.
"""

from vllm_lite.executor.base import Executor
from vllm_lite.executor.multiproc import MultiprocExecutor
from vllm_lite.process_settings import EngineSettings


def select(settings: EngineSettings, generation: int) -> Executor:
    """The executor of the worker group number `generation`; its workers are not started yet.

    Raises EngineError if its address is in use, ConfigError if there is no Ray cluster.
    """
    own_process = not settings.config.single_process
    backend = settings.config.distributed_executor_backend
    name = f"{settings.life}.{generation}"  # unique, since files of the replaced group may still exist
    address = f"ipc://{settings.run_dir}/workers-{name}" if own_process else f"{settings.address}-workers-{name}"
    folder = f"{settings.run_dir}/group-{name}"
    if backend == "ray":
        from vllm_lite.executor.ray.executor import RayExecutor  # importing ray takes a second

        return RayExecutor(settings.config, address, generation, settings.worker_module, folder)
    return MultiprocExecutor(settings.config, address, generation, settings.worker_module, group_folder=folder)
