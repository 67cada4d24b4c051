"""Models by hub id: the files to download, their location, and one-sentence errors.

huggingface_hub does the work, and is imported only for a hub id, as this takes longer than the rest of a client's
start. It runs on daemon threads, while the caller waits and polls `stopped`: an unwanted download ends at once, and a
later one resumes it.
"""

import errno
import re
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from vllm_lite.checkpoint.gguf.files import choose, first_files, listed
from vllm_lite.checkpoint.quantization.read import OLDER_FILES
from vllm_lite.checkpoint.tensors.headers import INDEX_FILE, SINGLE_FILE, Tensor, shards, unindexed, weight_files
from vllm_lite.errors import EngineError, ModelError, VllmLiteError
from vllm_lite.runtime import log

T = TypeVar("T")

CONFIG_FILES = ("config.json", "generation_config.json", *OLDER_FILES)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Names, or glob patterns."""
OTHER_TOKENIZERS = (
    "tokenizer.model*",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
)
"""Files to download from a repository without tokenizer.json."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_THREADS = 4
LOOK_S = 0.1
REACH_S = 2.5
"""Timeout of the first connection: without a network, huggingface_hub retries for 23 s."""
REQUEST_S = 15.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*(?::[A-Za-z0-9][\w.-]*)?")
_HUB_PAGE = re.compile(rf"(?:https?://)?(?:huggingface\.co|hf\.co)/({_HUB_ID.pattern})(?:/.*)?")

logger = log.get(__name__)


def never() -> bool:
    return False


class HubSource(NamedTuple):
    """The source of a model or a tokenizer: a hub id, its revision, and the folder for downloads."""

    name: str
    revision: str | None = None
    cache_dir: str | None = None
    """None: huggingface_hub's own cache (HF_HOME, HF_HUB_CACHE)."""

    @property
    def repository(self) -> str:
        """The hub id without the label."""
        return self.name.partition(":")[0]

    @property
    def label(self) -> str | None:
        """The label of a GGUF file in the repository, like Q4_K_M in org/model:Q4_K_M; None without a label."""
        return self.name.partition(":")[2] or None


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form org/model or org/model:LABEL, and is not a local path."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


What = Literal["model", "model without weights", "config", "tokenizer", "adapter"]


def local_folder(source: HubSource, stopped: Callable[[], bool] = never, what: What = "model") -> str:
    """Return the folder `source.name`, or download the parts of a hub id that `what` names. For GGUF models the first
    file is returned, and all files are downloaded.

    Raises ModelError in one sentence, and EngineError once `stopped()`.
    """
    if not is_hub_id(source.name):
        if (page := _HUB_PAGE.fullmatch(source.name)) is not None and not Path(source.name).exists():
            raise ModelError(f"{source.name}: a model of the hub is given by its id, {page[1]}")
        return str(Path(source.name).absolute())
    return str(_Download(source, stopped, what).run())


def remote_headers(source: HubSource) -> dict[str, Tensor]:
    """Read the headers of a hub id's safetensors files by range requests. Raises ModelError."""
    from huggingface_hub import HfApi

    with _one_sentence(source):
        if (unreached := _Download(source, never, "config").unreached()) is not None:
            raise unreached
        found = HfApi().get_safetensors_metadata(source.repository, revision=source.revision)
    return {
        name: Tensor(tensor.dtype, tuple(tensor.shape))
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


# ---- the files


SMALL_FILES: dict[What, tuple[str, ...]] = {
    "model": CONFIG_FILES + TOKENIZER_FILES,
    "model without weights": CONFIG_FILES + TOKENIZER_FILES,
    "config": CONFIG_FILES,
    "tokenizer": TOKENIZER_FILES,
    "adapter": ADAPTER_FILES,
}
"""Files to download other than weights. A repository must have the first one."""


def _weight_names(siblings: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield the names of the weight files. The index has been downloaded to `folder`."""
    if SINGLE_FILE in siblings:
        yield SINGLE_FILE
    elif INDEX_FILE in siblings:
        yield from shards(folder / INDEX_FILE)
    elif named := unindexed(name for name in siblings if "/" not in name):
        yield from named
    else:
        if first_files(siblings):
            raise _Lacks(f"has its weights in GGUF files; give one as ORG/MODEL:LABEL: {listed(siblings)}")
        held = ", ".join(name for name in siblings if not name.startswith("."))
        raise _Lacks(f"has no {SINGLE_FILE} and no {INDEX_FILE}; it holds {held}")


def _chosen(siblings: Sequence[str], label: str | None) -> list[str]:
    try:
        return choose(siblings, label)
    except LookupError as error:
        raise _Lacks(error.args[0]) from None


def _has_weights(folder: Path) -> bool:
    try:
        weight_files(folder)
    except ModelError:
        return False
    return True


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"))


# ---- the download


class _Progress:
    """Shows the progress over all files: a bar on a terminal, else an occasional log line."""

    def __init__(self, name: str, total: int) -> None:
        from tqdm import tqdm

        self.name, self.total, self.done = name, total, 0
        self._lock = threading.Lock()
        self._shown = self._logged = 0
        shown = sys.stderr.isatty()
        logger.info("downloading %s: %.1f MiB", name, total / 2**20)
        self._bar = tqdm(
            total=total, desc=name, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, disable=not shown
        )

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes

    def show(self) -> None:
        self._bar.update(self.done - self._shown)
        self._shown = self.done
        if self.done - self._logged > self.total / 10 and self.done < self.total:
            self._logged = self.done
            logger.info("%s: %.0f of %.0f MiB", self.name, self.done / 2**20, self.total / 2**20)

    def close(self) -> None:
        self.show()
        self._bar.close()


class _Download:
    """Downloads one snapshot. A HEAD request for the first file finds the commit, to which all others are pinned."""

    def __init__(self, source: HubSource, stopped: Callable[[], bool], what: What) -> None:
        self._source = source
        self._stopped = stopped
        self._small = SMALL_FILES[what]
        self._weights = what == "model"

    def run(self) -> Path:
        """Download missing files. Returns the folder."""
        from huggingface_hub import HfApi, constants, try_to_load_from_cache
        from huggingface_hub.errors import RemoteEntryNotFoundError

        source = self._source
        if source.label is not None:
            return self.run_gguf()
        with _one_sentence(source):
            first, is_offline = self._small[0], constants.is_offline_mode()
            unreached = None if is_offline else self.unreached()
            if unreached is not None:
                is_offline = True
                if not isinstance(try_to_load_from_cache(source.name, first, source.cache_dir, source.revision), str):
                    raise unreached
            try:
                folder = Path(
                    self._aside(lambda: self._fetch(first, source.revision, cached=unreached is not None))
                ).parent
            except RemoteEntryNotFoundError:
                info = self._aside(lambda: HfApi().model_info(source.repository, revision=source.revision))
                names = [sibling.rfilename for sibling in info.siblings or []]
                if first_files(names):
                    return self.run_gguf()
                held = ", ".join(names)
                raise _Lacks(f"has no {first}; it holds {held or 'nothing'}") from None
            has_all = not self._weights or _has_weights(folder)
            if is_offline and not has_all:
                away = f"{constants.ENDPOINT} cannot be reached; check the network"
                reason = "HF_HUB_OFFLINE is set; unset it" if unreached is None else away
                raise _Lacks(f"is not complete in the cache ({folder}) and {reason}")
            if is_offline or (self._weights and has_all and _has_tokenizer(folder)):
                return folder
            self._complete(folder)
        return folder

    def run_gguf(self) -> Path:
        """Download the GGUF files of the label, or the only model's, and the tokenizer's files. Returns the first file.
        Without a network, the cache is searched."""
        from huggingface_hub import HfApi, constants

        source = self._source
        with _one_sentence(source):
            unreached = None if constants.is_offline_mode() else self.unreached()
            if constants.is_offline_mode() or unreached is not None:
                folder = self._cached()
                held = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
                if not held:
                    away = "HF_HUB_OFFLINE is set; unset it" if constants.is_offline_mode() else f"{unreached}"
                    raise _Lacks(f"has no GGUF file in the cache ({folder}), and {away}")
                return folder / _chosen(held, source.label)[0]
            info = self._aside(
                lambda: HfApi().model_info(
                    source.repository, revision=source.revision, files_metadata=True, timeout=REQUEST_S
                )
            )
            sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
            chosen = _chosen(list(sizes), source.label)
            folder = self._snapshots() / str(info.sha)
            beside = [file for file in sizes if any(fnmatch(file, wanted) for wanted in TOKENIZER_FILES)]
            names = [file for file in (*beside, *chosen) if not (folder / file).exists()]
            self._fetch_all(names, sum(sizes[file] for file in names), folder)
            self._ref().parent.mkdir(parents=True, exist_ok=True)
            self._ref().write_text(str(info.sha))  # huggingface_hub records only commits that it looked up itself
            return folder / chosen[0]

    def _snapshots(self) -> Path:
        """The cache folder with the downloaded files of each commit."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        cache = Path(self._source.cache_dir or constants.HF_HUB_CACHE)
        return cache / repo_folder_name(repo_id=self._source.repository, repo_type="model") / "snapshots"

    def _ref(self) -> Path:
        """The cache file with the commit of the wanted revision."""
        return self._snapshots().parent / "refs" / (self._source.revision or "main")

    def _cached(self) -> Path:
        """The cache folder of the wanted revision, which may be incomplete or missing."""
        with suppress(OSError):
            return self._snapshots() / self._ref().read_text().strip()
        return self._snapshots() / (self._source.revision or "main")

    def unreached(self) -> OSError | None:
        """Try a first connection to the hub, including name resolution. Returns its error, None if it works."""
        try:
            self._aside(_connect, REACH_S)
        except OSError as error:
            return error
        return None

    def _complete(self, folder: Path) -> None:
        """Download all files, weights last: a folder with all weights is complete."""
        from huggingface_hub import HfApi

        commit, name = folder.name, self._source.repository
        info = self._aside(lambda: HfApi().model_info(name, revision=commit, files_metadata=True, timeout=REQUEST_S))
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        others = () if "tokenizer.json" in sizes or "tokenizer.json" not in self._small else OTHER_TOKENIZERS
        names = [file for file in sizes if any(fnmatch(file, wanted) for wanted in (*self._small, *others))]
        if self._weights:
            if INDEX_FILE in sizes and SINGLE_FILE not in sizes:
                self._aside(lambda: self._fetch(INDEX_FILE, commit))
            names += _weight_names(list(sizes), folder)
        names = [file for file in names if not (folder / file).exists()]
        self._fetch_all(names, sum(sizes.get(file, 0) for file in names), folder)

    def _fetch(
        self, name: str, revision: str | None, add: Callable[[int], None] = lambda _: None, *, cached: bool = False
    ) -> str:
        """Download one file and return its path. `cached`: take it from the cache, without a request."""
        from huggingface_hub import hf_hub_download

        return hf_hub_download(
            self._source.repository,
            name,
            revision=revision,
            cache_dir=self._source.cache_dir,
            tqdm_class=_bar(add),
            etag_timeout=REQUEST_S,
            local_files_only=cached,
        )

    def _fetch_all(self, names: Sequence[str], total: int, folder: Path) -> None:
        free = shutil.disk_usage(next(place for place in folder.parents if place.exists())).free
        if total > free:
            raise _Lacks(
                f"needs {total / 2**30:.1f} GiB and {folder.parents[2]} has {free / 2**30:.1f} GiB free; free some, "
                "or give --download-dir a folder on another disk"
            )
        if not names:
            return
        progress = _Progress(self._source.name, total)
        waiting, ended = deque(names), SimpleQueue[tuple[None, BaseException | None]]()

        def fetch_waiting() -> None:
            with suppress(IndexError):  # another thread has taken the last one
                while waiting and not self._stopped():
                    self._fetch(waiting.popleft(), folder.name, progress.add)

        num_threads = min(NUM_THREADS, len(names))
        for _ in range(num_threads):
            _start(fetch_waiting, ended)
        try:
            for _ in range(num_threads):
                _, error = self._wait(ended, progress)
                if error is not None:
                    raise error
        finally:
            waiting.clear()  # once one file has failed, the others are not needed
            progress.close()

    def _aside(self, function: Callable[[], T], within_s: float | None = None) -> T:
        """Call `function` on a thread, so that a hanging request cannot delay a stop. Raises TimeoutError after
        `within_s`."""
        ended = SimpleQueue[tuple[T | None, BaseException | None]]()
        _start(function, ended)
        result, error = self._wait(ended, within_s=within_s)
        if error is not None:
            raise error
        return result  # type: ignore[return-value] # or there is an error

    def _wait(self, ended: "SimpleQueue[T]", progress: _Progress | None = None, within_s: float | None = None) -> T:
        begun_s = time.monotonic()
        while not self._stopped():
            if within_s is not None and time.monotonic() - begun_s > within_s:
                raise TimeoutError(f"no connection within {within_s:g} s")
            if progress is not None:
                progress.show()
            try:
                return ended.get(timeout=LOOK_S)
            except Empty:
                continue
        raise EngineError(f"stopped while {self._source.name} was being downloaded")


def _start(function: Callable[[], T], ended: "SimpleQueue[tuple[T | None, BaseException | None]]") -> None:
    """Call `function` on a daemon thread, and put its result or its error into `ended`."""

    def work() -> None:
        try:
            ended.put((function(), None))
        except BaseException as error:
            ended.put((None, error))

    threading.Thread(target=work, name="hub", daemon=True).start()


def _connect() -> None:
    """Connect to the hub, or to its proxy, and disconnect. Raises OSError."""
    import urllib.request  # imports http and ssl, which a start from a local folder does not need

    from huggingface_hub import constants

    url, proxies = urlsplit(constants.ENDPOINT), urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = url.port or {"http": 80, "https": 443}.get(url.scheme, 1080)
    socket.create_connection((url.hostname or "", port), REACH_S).close()


def _bar(add: Callable[[int], None]) -> type:
    """Make a progress bar class for huggingface_hub, which calls `add` and shows nothing."""

    class CountingBar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            add(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

        def update(self, num_bytes: float | None = 1) -> None:
            add(int(num_bytes or 0))

    return CountingBar


# ---- failures


class _Lacks(Exception):
    """A clause about a missing part of a repository, to follow the repository's name."""


@contextmanager
def _one_sentence(source: HubSource) -> Iterator[None]:
    """Translate any exception of huggingface_hub into a ModelError with advice."""
    try:
        yield
    except VllmLiteError:
        raise
    except _Lacks as error:
        raise ModelError(f"{source.name} {error}") from None
    except Exception as error:
        raise ModelError(_sentence(source, error)) from error


def _sentence(source: HubSource, error: Exception) -> str:
    from huggingface_hub import constants, errors, get_token

    name, hub = source.name, constants.ENDPOINT
    revision = f" in revision {source.revision!r}" if source.revision else ""
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return f"{name}: the disk is full; free some of it, or give --download-dir a folder on another one"
    status = next((cause.response.status_code for cause in causes if isinstance(cause, errors.HfHubHTTPError)), None)
    token = "the token in HF_TOKEN may not read it" if get_token() else "set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: ask for access at {hub}/{name}, and {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {source.revision!r}; give --revision a branch, a tag or a commit of it"
    if isinstance(error, errors.NotASafetensorsRepoError):
        return f"{name} has no {SINGLE_FILE} and no {INDEX_FILE}{revision}, and only safetensors is read"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{name}: there is no such folder here, and no such model at {hub}, or it is private: check the name, or "
            f"{token}"
        )
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        return (
            f"{name}{revision} is not in the cache ({source.cache_dir or constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE "
            "is set; unset it, or give the folder of a checkpoint"
        )
    if status is not None:
        return f"{name}: {hub} answered with status {status}; try again later"
    if isinstance(error, PermissionError):
        return f"{name}: {error.filename} cannot be written; give --download-dir a folder that can"
    root = causes[-1]
    return f"{name} is not in the cache, and {hub} cannot be reached ({type(root).__name__}: {root}); check the network"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
