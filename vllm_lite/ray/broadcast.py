"""broadcast(): call a method of all replicas of a deployment of Ray Serve, and have what answers in time."""

import asyncio
from typing import TYPE_CHECKING, Any

from vllm_lite.ray.session import ReplicaLostError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

GRACE_S = 0.5
"""How much later than the others a replica may answer that was silent the last time."""


async def broadcast(
    handle: "DeploymentHandle", method: str, timeout_s: float, *arguments: bytes, num_late: int = 0
) -> tuple[list[bytes], list[str]]:
    """The answers that came in time, one at least, and why others did not come; the last `num_late` are not waited for
    long. Raises ReplicaLostError if there is none.

    Not by the results_async() of what Serve returns: to that, one replica that hangs is the end of all answers.
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
            call.cancel()  # of no effect if it is done
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
    """Wait for calls; once only `num_late` are left, but not all, no longer than GRACE_S for the next."""
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
