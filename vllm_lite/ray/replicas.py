"""ServeReplicas: the engine's replicas, through a handle of Ray Serve."""

from collections.abc import AsyncGenerator

from ray.serve.handle import DeploymentHandle

from vllm_lite.ray.broadcast import broadcast, first_line
from vllm_lite.ray.catch_up import ReplicaState, states
from vllm_lite.ray.messages import UNKNOWN, Answer, Introduction, Route, Routed, answers, introductions
from vllm_lite.ray.session import ReplicaLostError

LOOK_S = 5.0
"""The longest that replicas take to introduce themselves."""


class ServeReplicas:
    """See Replicas. Streams go over gRPC, which costs a third of what Ray's objects cost for so little content."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._streams = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._handle = handle
        self.num_silent = 0

    async def generate(self, payload: bytes, route: Route) -> AsyncGenerator[bytes, None]:
        response = self._streams.remote(Routed(payload, route))
        try:
            async for message in response:
                yield message
        except Exception as error:  # Ray's, Serve's and gRPC's: the replica has ended, or there is none
            raise ReplicaLostError(f"{type(error).__name__}: {first_line(error)}") from error
        finally:
            response.cancel()  # of no effect if it has ended

    async def ask(self, payload: bytes, timeout_s: float, *, needs_all: bool) -> list[Answer]:
        num_late = 0 if needs_all else self.num_silent
        found, errors = await broadcast(self._handle, "ask", timeout_s, payload, num_late=num_late)
        return [answers.decode(each) for each in found] + [Answer(UNKNOWN, error=error) for error in errors]

    async def introduce(self) -> list[Introduction]:
        found, errors = await broadcast(self._handle, "introduce", LOOK_S, num_late=self.num_silent)
        self.num_silent = len(errors)
        return [introductions.decode(each) for each in found]

    async def states(self) -> list[ReplicaState]:
        """The states of those that serve; raises as introduce() does."""
        return [states.decode(each) for each in (await broadcast(self._handle, "state", LOOK_S))[0]]
