"""ServeReplicas: the engine's replicas, through a handle of Ray Serve."""

from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.handle import DeploymentHandle

from vllm_lite.ray.messages import Answer, Introduction, Route, Routed, answers, introductions
from vllm_lite.ray.session import ReplicaLostError

LOOK_S = 5.0
"""The longest that replicas take to introduce themselves."""


class ServeReplicas:
    """See Replicas. Streams go over gRPC, which costs a third of what Ray's objects cost for so little content."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._streams = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._handle = handle

    async def generate(self, payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
        response = self._streams.remote(Routed(payload, route))
        try:
            async for message in response:
                yield message
        except Exception as error:  # Ray's, Serve's and gRPC's: the replica has ended, or there is none
            raise ReplicaLostError(f"{type(error).__name__}: {_first_line(error)}") from error
        finally:
            response.cancel()  # of no effect if it has ended

    async def ask(self, payload: bytes, timeout_s: float) -> list[Answer]:
        return [answers.decode(found) for found in await self._broadcast("ask", timeout_s, payload)]

    async def introduce(self) -> list[Introduction]:
        return [introductions.decode(found) for found in await self._broadcast("introduce", LOOK_S)]

    async def _broadcast(self, method: str, timeout_s: float, *arguments: bytes) -> list[bytes]:
        try:
            asked = self._handle.broadcast(method, *arguments)
            found: list[Any] = await asked.results_async(timeout_s=timeout_s, return_exceptions=True)
        except Exception as error:
            raise ReplicaLostError(f"{type(error).__name__}: {_first_line(error)}") from error
        given = [answer for answer in found if isinstance(answer, bytes)]
        if not given:
            raise ReplicaLostError(_first_line(found[0]) if found else "there is no replica")
        return given


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
