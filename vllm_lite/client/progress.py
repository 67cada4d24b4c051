"""The progress bar of LLM.generate and of commands, with tokens per second. tqdm is imported when one is shown."""

import threading
import time
from typing import Any, Self


class TokenBar:
    """Counts finished requests and generated tokens; shows them on stderr if enabled."""

    def __init__(
        self, num_requests: int, *, enabled: bool, name: str = "generating", has_rate: bool = True, stays: bool = True
    ) -> None:
        """`has_rate`: it shows tokens per second. `stays`: it is still shown after its end."""
        self._has_rate = has_rate
        self._num_tokens = 0
        self._began_s = time.monotonic()
        self._bar: Any = _make_bar(num_requests, name, stays) if enabled else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._show()
            self._bar.close()

    def tokens(self, count: int) -> None:
        self._num_tokens += count
        if self._bar is not None:
            self._show()
            self._bar.update(0)  # redraws if due

    def request(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def _show(self) -> None:
        if not self._has_rate:
            return
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:.0f} tokens/s", refresh=False)


def _make_bar(total: int, name: str, stays: bool) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        """A tqdm without the semaphore (for other processes) and the thread that it makes by default."""

        _lock = threading.RLock()
        monitor_interval = 0

    return Bar(total=total, desc=name, unit="prompt", dynamic_ncols=True, leave=stays)
