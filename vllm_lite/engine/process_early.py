"""Entry point of an engine whose worker starts before it imports anything, or, with `serve`, knows its settings.

The processes of a start then import side by side. Whether that worker is wanted shows in the settings; one that
is not ends without having had any (executor/multiproc.py).
"""

from vllm_lite.runtime import supervise

WORKER = "vllm_lite.worker.process"


def main() -> None:
    supervise.spawn_early(WORKER)
    from vllm_lite.engine.process import run

    run()


if __name__ == "__main__":
    main()
