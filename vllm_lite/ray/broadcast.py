"""broadcast(): call a method of all replicas of a deployment of Ray Serve, and collect the answers that come in
time."""

import asyncio
from typing import TYPE_CHECKING, Any

from vllm_lite.ray.session import ReplicaLostError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

GRACE_S = 0.5
"""Seconds to wait, after the others have answered, for replicas that did not answer the last time."""


async def broadcast(
    handle: "DeploymentHandle", method: str, timeout_s: float, *arguments: bytes, num_late: int = 0
) -> tuple[list[bytes], list[str]]:
    """Returns the answers that came in time, at least one, and the errors of the others. The last `num_late` replicas
    get only GRACE_S after the others. Raises ReplicaLostError if there is no answer.

    Serve's results_async() is not used: with it, one replica that hangs blocks all answers.
    """
    try:
        asked = handle.broadcast(method, *arguments)
        replicas = await asyncio.wait_for(asked._fetch_replica_results_async(), timeout_s)  # noqa: SLF001
    except Exception as error:
        raise ReplicaLostError(f"{type(error).__name__}: {first_line(error)}") from error
    calls = [asyncio.ensure_future(replica.get_async()) for replica in replicas]
    try:
        await _wait(calls, num_late, timeout_s)
    finally:
        for call in calls:
            call.cancel()  # without effect on a finished call
    late = f"a replica did not answer within {timeout_s:g} s"
    found, errors = [], []
    for call in calls:
        failed = call.exception() if call.done() and not call.cancelled() else TimeoutError(late)
        if failed is None:
            found.append(call.result())
        else:
            errors.append(f"{type(failed).__name__}: {first_line(failed)}")
    if not found:
        raise ReplicaLostError(errors[0] if errors else "there is no replica")
    return found, errors


async def _wait(calls: "list[asyncio.Future[Any]]", num_late: int, timeout_s: float) -> None:
    """Wait for calls; once only `num_late` remain, but not all calls, at most GRACE_S for each."""
    clock = asyncio.get_running_loop().time
    deadline_s, left = clock() + timeout_s, set(calls)
    while left:
        patience_s = deadline_s - clock()
        if len(left) <= num_late < len(calls):
            patience_s = min(GRACE_S, patience_s)
        done, left = await asyncio.wait(left, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
