"""Masks that change with each token: the interface through which a grammar rules tokens out.

A sequence may have a MaskSource, which follows its output and knows which tokens may come next. Sources are called once
per sample; their bitmasks are applied to all rows of logits at once. Sequences without a source cost nothing.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding

from vllm_lite.errors import GrammarError
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.kernels.cuda import masks as on_gpu
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.sampling import MaskedRows
from vllm_lite.protocol.params import Sampling
from vllm_lite.structured.sources.source import MaskSource

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Uint32s = NDArray[np.uint32]

NEVER = -float("inf")
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTES = np.where(_BITS == 1, np.float32(0), np.float32(NEVER))
"""Value of a bitmask's byte -> float32 [8] to add to the logits of its eight tokens. Unpacking by table is 30 times
as fast as by shifts."""


MaskSourceOf = Callable[[Sampling], "MaskSource | Future[Any] | None"]
"""Makes the source of a new sequence or fork with rules: None if it needs no mask, a future if the source is still
being compiled."""

CONTRADICTION = "its grammar allows no token that allowed_token_ids, bad_words and its other rules leave"
BROKEN = "its output does not follow its grammar"


class SequenceMask:
    """Keeps a sequence's source up to date with the sequence's tokens.

    The source accepts tokens lazily, when the next mask is needed, and drafts do not stay accepted. So it never has to
    roll back a token that the engine replaced, and a preempted sequence keeps it unchanged.

    A source that is still being compiled is not called, and rules nothing out, before settle(): with several ranks it
    has to be ready on all of them.
    """

    def __init__(self, source: "MaskSource | Future[Any]", num_prompt: int) -> None:
        self._coming = source if isinstance(source, Future) else None
        self._source: MaskSource | None = None if isinstance(source, Future) else source
        self._num_accepted = num_prompt  # of the sequence's tokens; the source never gets those of the prompt
        self._failure: str | None = None

    @property
    def coming(self) -> "Future[Any] | None":
        """Future of a source that is not settled yet; None for a settled one."""
        return self._coming

    def settle(self, failure: str | None) -> None:
        """Use the source from now on, which is ready on all ranks, or fail with the reason `failure`."""
        if self._coming is not None and failure is None:
            self._source = self._coming.result()
        self._coming, self._failure = None, failure

    def explain(self) -> str:
        """Reason why the sequence has no token left to sample."""
        return self._failure or CONTRADICTION

    def fill(self, tokens: Int32s, bitmasks: Uint32s) -> None:
        """Write the masks of a sequence's samples, of which the first follows its last token, the others its drafts.

        tokens: [num_tokens + num_samples - 1], those before the last sample; bitmasks: [num_samples, words], all set.
        """
        if self._coming is not None:
            return
        num_tokens = len(tokens) - len(bitmasks) + 1
        source = self._follow(tokens[:num_tokens])
        if source is None:
            bitmasks[:] = 0  # the sampler then ends this sequence, and no other
            return
        num_drafts = 0
        try:
            source.fill_bitmask(bitmasks[0])
            for draft, bitmask in zip(tokens[num_tokens:].tolist(), bitmasks[1:], strict=True):
                if not source.accept(draft):
                    break  # the sample in the draft's place will differ, so later samples do not count
                num_drafts += 1
                source.fill_bitmask(bitmask)
            source.rollback(num_drafts)
        except GrammarError as error:
            self._fail(error)
            bitmasks[:] = 0

    def fill_behind(
        self,
        tokens: Int32s,  # [num_tokens], all that the sequence has
        drafts: Int32s,  # [num_drafts]
        bitmask: Uint32s,  # [words], all set
    ) -> None:
        """Write the mask of the tokens that may follow the drafts; all bits are cleared if the drafts are not allowed
        themselves. The source does not keep the drafts."""
        if self._coming is not None:
            return
        source = self._follow(tokens)
        if source is None:
            bitmask[:] = 0
            return
        num_accepted = 0
        try:
            for draft in drafts.tolist():
                if not source.accept(draft):
                    bitmask[:] = 0
                    break
                num_accepted += 1
            else:
                source.fill_bitmask(bitmask)
            source.rollback(num_accepted)
        except GrammarError as error:
            self._fail(error)
            bitmask[:] = 0

    def forced(self, tokens: Int32s) -> list[int]:
        """Tokens that must follow `tokens` [num_tokens], all of the sequence; [] if there is a choice."""
        try:
            source = self._follow(tokens)
            return source.forced_tokens() if source is not None else []
        except GrammarError as error:
            self._fail(error)
            return []

    def num_valid(
        self,
        tokens: Int32s,  # [num_tokens], all that the sequence has
        drafts: Int32s,  # [num_drafts]
    ) -> int:
        """Number of drafts that may follow the tokens."""
        try:
            source = self._follow(tokens)
            return source.num_valid(drafts.tolist()) if source is not None else 0
        except GrammarError as error:
            self._fail(error)
            return 0

    def _follow(self, tokens: Int32s) -> MaskSource | None:
        """Let the source accept all of `tokens`, and return it. None if there is no source, or a token is not
        allowed."""
        source = self._source
        if source is None:
            return None
        try:
            for token in tokens[self._num_accepted :].tolist():
                if not source.accept(token):
                    self._source, self._failure = None, BROKEN
                    return None
        except GrammarError as error:
            self._fail(error)
            return None
        self._num_accepted = len(tokens)
        return source

    def _fail(self, error: GrammarError) -> None:
        self._source, self._failure = None, str(error)


class TokenMasks:
    """Limits samples to the tokens in their bitmasks, by the device's fastest implementation.

    Minus infinity is added to the logits of other tokens, so that a NaN of the model stays visible, and an infinity
    becomes NaN. On a GPU the bitmasks are copied there once, for all steps in which they are applied.
    """

    def __init__(
        self,
        samples: Int64s,  # [n], none of them twice
        bitmasks: Uint32s,  # [n, ceil(vocab / 32)]
    ) -> None:
        self._masked = MaskedRows(samples, bitmasks)
        self._on_device: on_gpu.OnDevice | None = None

    def apply(self, logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
        if (launcher := launcher_for(logits)) is not None:
            if self._on_device is None:
                self._on_device = on_gpu.bring(logits, self._masked)
            on_gpu.rule_out(launcher, logits, self._on_device)
        elif logits.device.type == "cpu" and cpu.available():
            native.rule_out(logits, self._masked)
        else:
            self.apply_plainly(logits)

    def apply_plainly(self, logits: torch.Tensor) -> None:
        """Apply the bitmasks in plain torch: the reference of all other implementations."""
        samples, bitmasks = self._masked
        tokens_of_byte = torch.from_numpy(BYTES).to(logits.device)
        packed = torch.from_numpy(bitmasks.view(np.uint8)).to(logits.device).int()  # [n, bytes]
        added = embedding(packed, tokens_of_byte).flatten(1)[:, : logits.shape[1]]
        logits.index_add_(0, torch.from_numpy(samples).to(logits.device), added)


def allow_all(logits: torch.Tensor) -> None:  # float32 [num_samples, vocab]
    """Apply a mask that allows all tokens, so that the kernel is compiled before a request needs it."""
    words = -(-logits.shape[1] // 32)
    TokenMasks(np.zeros(1, np.int64), np.full((1, words), 0xFFFFFFFF, np.uint32)).apply(logits)


def launcher_for(logits: torch.Tensor) -> Launcher | None:
    """Launcher of kernels for the logits' device; None if that is not a GPU, or kernels cannot be compiled."""
    return default_launcher() if logits.is_cuda else None


def bitmask_of(ids: NDArray[Any], vocab_size: int) -> Uint32s:  # [ceil(vocab / 32)]
    """Make the bitmask that allows these token ids and no others."""
    allowed = np.zeros(32 * -(-vocab_size // 32), np.bool_)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)
