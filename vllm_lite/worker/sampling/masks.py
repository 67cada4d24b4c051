"""Masks that change with each token: the seam through which a grammar rules tokens out.

A sequence may have a MaskSource, which follows what the sequence generates and says which tokens may come next. Sources
are asked once for every sample; what they answer is applied to all rows of logits at once. Sequences without a source
cost nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import masks as native
from vllm_lite.kernels.cuda import masks as on_gpu
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.masks import MaskedRows
from vllm_lite.protocol.params import Sampling

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Uint32s = NDArray[np.uint32]

NEVER = -float("inf")
ALL_BITS = 0xFFFFFFFF
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTES = np.where(_BITS == 1, np.float32(0), np.float32(NEVER))
"""What each byte of a bitmask adds to the logits of its eight tokens, [256, 8]: unpacking by table is 30 times as fast
as by shifts."""


class MaskSource(Protocol):
    """Follows the output of one sequence. Its state must depend on sampling params and accepted tokens alone."""

    def accept(self, token: int) -> bool:
        """Go on by one generated token. Returns False, and changes nothing, if the token may not come here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""
        ...

    def fill_bitmask(self, bitmask: Uint32s) -> None:
        """Clear the bits of the tokens that may not come next.

        bitmask: [ceil(vocab / 32)], all bits set; token t has bit t % 32 of word t // 32.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, one behind the other; [] if there is a choice, or it is not known.

        They are drafted, so an error here costs time and no more.
        """
        ...

    def num_valid(self, tokens: Sequence[int]) -> int:
        """Count how many of these may follow, one behind the other, before the first that may not."""
        ...


MaskSourceOf = Callable[[Sampling], MaskSource | None]
"""Makes the source of a new sequence or fork that has rules; None for one that needs no mask."""


class SequenceMask:
    """Keeps a sequence's source up to date with the sequence's tokens.

    The source accepts tokens late, when the next mask is wanted, and no draft stays accepted. So it never has to take
    back a token that the engine replaced, and a preempted sequence keeps it as it is.
    """

    def __init__(self, source: MaskSource, num_prompt: int) -> None:
        self._source = source
        self._num_accepted = num_prompt  # of the sequence's tokens; the source never gets those of the prompt
        self._is_lost = False  # the sequence has a token that the source refuses

    def fill(self, tokens: Int32s, bitmasks: Uint32s) -> None:
        """Write the masks of a sequence's samples, of which the first follows its last token, the others its drafts.

        tokens: [num_tokens + num_samples - 1], those before the last sample; bitmasks: [num_samples, words].
        """
        num_tokens = len(tokens) - len(bitmasks) + 1
        if not self._follow(tokens[:num_tokens]):
            bitmasks[:] = 0  # the sampler then ends this sequence, and no other
            return
        self._source.fill_bitmask(bitmasks[0])
        num_drafts = 0
        for draft, bitmask in zip(tokens[num_tokens:].tolist(), bitmasks[1:], strict=True):
            if not self._source.accept(draft):
                break  # the sample in the draft's place will differ, so the samples behind it do not count
            self._source.fill_bitmask(bitmask)
            num_drafts += 1
        self._source.rollback(num_drafts)

    def forced(self, tokens: Int32s) -> list[int]:
        """Return what must follow `tokens` [num_tokens], all that the sequence has; [] if there is a choice."""
        return self._source.forced_tokens() if self._follow(tokens) else []

    def num_valid(
        self,
        tokens: Int32s,  # [num_tokens], all that the sequence has
        drafts: Int32s,  # [num_drafts]
    ) -> int:
        """Count how many drafts may follow the tokens."""
        return self._source.num_valid(drafts.tolist()) if self._follow(tokens) else 0

    def _follow(self, tokens: Int32s) -> bool:
        """Have the source accept all of `tokens`. Returns False if one of them may not stand where it does."""
        for token in tokens[self._num_accepted :].tolist():
            self._is_lost = self._is_lost or not self._source.accept(token)
        self._num_accepted = len(tokens)
        return not self._is_lost


class TokenMasks:
    """Limits some samples to the tokens in their bitmasks, by the fastest implementation that the device has.

    Minus infinity is added to the logits of what is ruled out, so that a NaN of the model stays visible, and an
    infinity becomes one. On a GPU the bitmasks are brought there once, for all steps that they are applied in.
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
        """Do the same in plain torch: the reference of all other implementations."""
        samples, bitmasks = self._masked
        tokens_of_byte = torch.from_numpy(BYTES).to(logits.device)
        packed = torch.from_numpy(bitmasks.view(np.uint8)).to(logits.device).int()  # [n, bytes]
        added = embedding(packed, tokens_of_byte).flatten(1)[:, : logits.shape[1]]
        logits.index_add_(0, torch.from_numpy(samples).to(logits.device), added)


def launcher_for(logits: torch.Tensor) -> Launcher | None:
    """Return what launches kernels where the logits are; None if that is no GPU, or one without kernels."""
    return default_launcher() if logits.is_cuda else None


def bitmask_of(ids: NDArray[Any], vocab_size: int) -> Uint32s:  # [ceil(vocab / 32)]
    """Make the bitmask that allows these token ids and no others."""
    allowed = np.zeros(32 * -(-vocab_size // 32), np.bool_)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def masks_of_step(
    masked: list[tuple[int, int, SequenceMask]],  # first sample, number of samples, mask
    positions: Int64s,  # [num_samples], index in its sequence of the token about to be sampled
    rows: Int64s,  # [num_samples]
    token_ids: Int32s,  # [max_rows, max_tokens]
    vocab_size: int,
) -> TokenMasks:
    """Ask the sources for the masks of one step."""
    samples = np.concatenate([np.arange(first, first + count) for first, count, _ in masked])
    bitmasks = np.full((len(samples), -(-vocab_size // 32)), ALL_BITS, np.uint32)
    start = 0
    for first, count, mask in masked:
        tokens = token_ids[rows[first], : positions[first + count - 1]]
        mask.fill(tokens, bitmasks[start : start + count])
        start += count
    return TokenMasks(samples, bitmasks)
