"""AdapterLoader: has the workers load and drop adapters, as clients ask and as waiting requests need them.

The workers keep at most `max_cpu_loras` adapters. A further one evicts an unused one, which is read again from its
folder when it is wanted again. New workers start without adapters and read them in the same way.
"""

import time
from collections.abc import Callable

from vllm_lite.config import ResolvedConfig
from vllm_lite.engine.adapters import MAX_ADAPTERS, Adapter
from vllm_lite.engine.request import Produced
from vllm_lite.engine.scheduling.scheduler import Scheduler
from vllm_lite.errors import ModelError
from vllm_lite.executor import blocking
from vllm_lite.executor.base import Executor
from vllm_lite.protocol.adapters import AdapterAnswer, AdapterInfo, LoadAdapter, UnloadAdapter
from vllm_lite.runtime import log
from vllm_lite.runtime.nested_settings import wrong_adapter_name
from vllm_lite.transport import Wakeup

logger = log.get(__name__)

Send = Callable[[AdapterAnswer], object]
Asked = tuple[int, Send]
"""Number of a client's question, and the function that sends the answer."""


class AdapterLoader:
    """Loads and drops the adapters of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: ResolvedConfig,
        end_requests: Callable[[Adapter, str], list[Produced]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end_requests(adapter, error)` ends the requests of an adapter."""
        self._scheduler = scheduler
        self._config = config
        self._adapters = scheduler.queues.adapters
        self._end_requests = end_requests
        self.on_listed: Callable[[], object] = lambda: None
        """Called when the list of adapters has changed."""
        self.clock = clock
        self._loading: set[Adapter] = set()
        self._executor: Executor | None = None
        """Executor of the workers that load `_loading`."""
        self.asked: dict[Adapter, list[Asked]] = {}
        """Unanswered questions about adapters that have not been loaded once yet."""

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The listed adapters, as clients receive them."""
        listed = [each for each in self._adapters.listed if each not in self.asked]
        return tuple(AdapterInfo(each.name, each.path, each.parent) for each in listed)

    # ---- clients' messages

    def load(self, message: LoadAdapter, send: Send) -> None:
        """Load an adapter, or answer that it is loaded. A new adapter gets its name at once, so that requests can wait
        for it. One that replaces another gets the name when it is loaded."""
        question, name = message.question, message.name
        if (refusal := self._refusal(message)) is not None:
            send(AdapterAnswer(question, name, refusal))
            return
        adapter = self._adapters.get(name)
        if adapter is None or message.in_place:
            before, adapter = adapter, self._adapters.make(name, message.path, message.parent)
            if before is None:
                self._adapters.enlist(adapter)
            self._adapters.wanted[adapter] = None
            self.asked[adapter] = [(question, send)]
        elif adapter in self.asked:
            self.asked[adapter].append((question, send))
        else:  # sent again, by a client that has connected to a new engine
            send(AdapterAnswer(question, name))

    def _refusal(self, message: LoadAdapter) -> str | None:
        known = self._adapters.get(message.name)
        if not self._config.enable_lora:
            return "this engine serves no adapters; start it with --enable-lora"
        if wrong := wrong_adapter_name(message.name):
            return wrong
        if message.name == self._config.served_model_name:
            return f"an adapter cannot be called {message.name!r}, as the model is"
        if len(self._adapters.by_number) >= MAX_ADAPTERS:
            return f"there are {MAX_ADAPTERS} adapters already; unload some"
        if known is not None and known.path != message.path and not message.in_place:
            return f"adapter {message.name!r} is loaded from {known.path}; unload it first, or replace it in place"
        return None

    def unload(self, message: UnloadAdapter, send: Send) -> None:
        """Remove an adapter's name. Its requests continue; after the last one its memory is freed."""
        adapter = self._adapters.get(message.name)
        if adapter is None:
            text = f"there is no adapter {message.name!r}"
            send(AdapterAnswer(message.question, message.name, text, is_missing=True))
            return
        self._adapters.delist(adapter)
        self._answer_all(adapter, f"adapter {adapter.name!r} was unloaded before it was there")
        logger.info("adapter %r is unloaded; %d of its requests continue", adapter.name, adapter.num_requests)
        self.on_listed()
        send(AdapterAnswer(message.question, message.name))

    # ---- at the start

    def load_configured(self, executor: Executor, stop: Wakeup) -> None:
        """Load the configured adapters, one after another. Raises ModelError for one that cannot be served, and the
        errors of blocking.load."""
        for module in self._config.lora_modules:
            adapter = self._adapters.make(module.name, module.path, module.base_model_name)
            self._adapters.enlist(adapter)
            if self._num_in_memory() >= self._adapters.limits.in_memory:
                self._evict(executor)
            read = blocking.read_adapter(
                executor, (adapter.number, adapter.name, adapter.path), self._config.ready_timeout_s, stop
            )
            if read.error is not None:
                raise ModelError(read.error)
            self._set_loaded(adapter, read.digest)
        if self._config.lora_modules:
            names = ", ".join(module.name for module in self._config.lora_modules)
            logger.info("adapters: %s", names)

    # ---- in every pass of the engine's loop

    def receive(self, executor: Executor, produced: list[Produced]) -> None:
        """Apply the workers' answers about adapters. Requests that end because of them are appended to `produced`."""
        if executor is not self._executor:  # new workers know nothing of earlier loads
            lost, self._executor, self._loading = self._loading, executor, set()
            for each in lost:  # its files may have killed the workers: the new ones must not read them unasked
                reason = f"adapter {each.name!r} ({each.path}) was being read when the workers were lost"
                self._fail(each, f"{reason}; ask again if it is sound", produced, is_missing=False)
        for read in executor.adapters_read():
            adapter = self._adapters.by_number.get(read.number)
            if adapter is None:
                continue
            self._loading.discard(adapter)
            if read.error is None:
                self._set_loaded(adapter, read.digest)
                if adapter in self.asked:
                    self._on_first_loaded(adapter)
            else:
                self._fail(adapter, read.error, produced, is_missing=read.is_missing)

    def send(self, executor: Executor) -> None:
        """Let the workers drop idle adapters, and load wanted ones as far as there is room."""
        adapters = self._adapters
        for adapter in adapters.idle():
            if adapter not in self._loading and adapter not in self.asked:
                self._drop(adapter, executor)
                adapters.forget(adapter)
        for adapter in list(adapters.wanted):
            if adapter in self._loading:
                continue
            if adapter.is_loaded or not (adapter.num_requests or adapter in self.asked):  # no longer needed
                adapters.wanted.pop(adapter)
                continue
            if self._num_in_memory() >= adapters.limits.in_memory and not self._evict(executor):
                break
            self._loading.add(adapter)
            executor.read_adapter(adapter.number, adapter.name, adapter.path)

    def _num_in_memory(self) -> int:
        return len(self._loading) + sum(each.is_loaded for each in self._adapters.by_number.values())

    def _evict(self, executor: Executor) -> bool:
        victim = self._adapters.victim(self._scheduler.running, self.clock())
        if victim is None:
            return False
        self._drop(victim, executor)
        return True

    def _drop(self, adapter: Adapter, executor: Executor) -> None:
        self._adapters.wanted.pop(adapter, None)
        if adapter.is_loaded:
            executor.drop_adapter(adapter.number)
            self._adapters.change(adapter, is_loaded=False)

    def _set_loaded(self, adapter: Adapter, digest: bytes) -> None:
        adapter.read_as(digest)
        adapter.loaded_s = self.clock()
        self._adapters.use(adapter)
        self._adapters.change(adapter, is_loaded=True)

    def _on_first_loaded(self, adapter: Adapter) -> None:
        self._adapters.enlist(adapter)
        logger.info("adapter %r is loaded from %s", adapter.name, adapter.path)
        self._answer_all(adapter, None)

    def _answer_all(self, adapter: Adapter, error: str | None, *, is_missing: bool = False) -> None:
        """Answer the questions about a new adapter: with None that it is loaded and listed, or with the error."""
        asked = self.asked.pop(adapter, ())
        if error is None:
            self.on_listed()
        for question, send in asked:
            send(AdapterAnswer(question, adapter.name, error, is_missing))

    def _fail(self, adapter: Adapter, error: str, produced: list[Produced], *, is_missing: bool) -> None:
        self._adapters.wanted.pop(adapter, None)
        logger.warning("%s", error)
        produced += self._end_requests(adapter, error)
        if adapter in self.asked:
            self._adapters.delist(adapter)
            self._answer_all(adapter, error, is_missing=is_missing)
