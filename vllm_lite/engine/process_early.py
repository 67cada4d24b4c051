"""Entry point of an engine that spawns a worker process before its own imports and, under `serve`, before its settings.

Engine and worker then import at the same time. If the settings call for no such worker, it ends without having received
any (executor/multiproc.py).
"""

from vllm_lite.runtime import supervise

WORKER = "vllm_lite.worker.process"


def main() -> None:
    supervise.spawn_early(WORKER)
    from vllm_lite.engine.process import run

    run()


if __name__ == "__main__":
    main()
