"""From logits to tokens where several ranks hold the model: each has made the logits of its own columns, and each needs
all tokens, because each keeps the sequences.

- Rows that all take their best token: each rank finds the best of its columns, and what the ranks exchange is these, 8
  bytes a row. No rank sees the others' logits. Where they are few and in one memory, all ranks look at all of them.
- Other rows need complete logits. The ranks share out the rows and exchange the tokens; where there are fewer rows than
  ranks, all pick all, and rank 0's tokens count. Rules change all columns: where the logits are in one memory, rank 0
  applies them; where each rank has a copy, each does.

Each rank looks up the logprobs of its rows; rank 0 alone reports them. All ranks must be given equal inputs; then all
get equal tokens and failures.

Every step that samples ends with an exchange or a barrier, on the CPU. So logits that were made while another rank
ended, which may be wrong, do not become tokens.

Where the logits are in one memory, no rank may write what another still reads or writes:

- Rank 0 applies rules when all columns are there (`gather`), and the others read them behind a barrier. Where some rows
  want logprobs, which are those of the logits before, another barrier comes before the rules.
- The next step writes logits into the same memory. Each rank has read all that it reads before it comes to the last
  exchange or barrier, and no rank leaves that before all have come.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cuda.patience import PATIENCE_S
from vllm_lite.models.registry import Model
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.worker.sampling.logit_rules import LogitEdits
from vllm_lite.worker.sampling.row_share import RowShare, exchange
from vllm_lite.worker.sampling.sampler import (
    Sampled,
    SampleInputs,
    Sampler,
    TokenSampler,
    draw_records,
    failures,
    is_plain,
    listed,
    wants_logprobs,
)
from vllm_lite.worker.sampling.staged_sampler import StagedSampler

FOUND = np.dtype([("best", np.float32), ("token", np.int32)])
"""What ranks exchange of a row: its largest logit, NaN if one of them is, and the token that was picked."""
FEW_LOGITS = 1 << 18
"""So many logits in one memory every rank looks at alike: that takes 30 us at most, and two barriers take less than an
exchange (one row of 32,000 or 152,000 logits, two ranks: 6 or 14 us instead of 27 or 52)."""

Founds = NDArray[np.void]


def sampler_of(model: Model, device: torch.device, patience_s: float = PATIENCE_S) -> TokenSampler:
    """Make the sampler for this rank's part of the model. The part that is the whole pays nothing for the others.
    `patience_s`: as Sampler has it."""
    communicator, sampler = model.communicator, Sampler(model.spec.vocab_size, device, patience_s)
    ranked: TokenSampler = sampler
    if communicator.shard.world > 1:
        ranked = RankedSampler(sampler, communicator, model.own_columns, model.gather_logits)
    return ranked if communicator.shard.stage.count == 1 else StagedSampler(ranked, communicator)


class RankedSampler:
    """Samples as Sampler does, and with the same results, together with the other ranks."""

    def __init__(
        self,
        sampler: Sampler,
        communicator: Communicator,
        own_columns: slice,
        gather: Callable[[torch.Tensor], None],  # completes logits of which each rank has its own columns
    ) -> None:
        self._sampler = sampler
        self._communicator = communicator
        self._own_columns = own_columns
        self._gather = gather

    def sample(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab], of which this rank has filled its own columns
        inputs: SampleInputs,
    ) -> Sampled:
        """Sample one token per row, the same on all ranks. A row whose logits are not finite on any rank is reported as
        failed; no other row notices. Logprobs are None on all ranks but the first."""
        if not len(inputs.params):
            return Sampled(np.empty(0, np.int64), {}, None)
        if inputs.plain or (inputs.edits is None and is_plain(inputs.params)):
            tokens, best = self._best(logits)
            return Sampled(tokens, failures(best), None)
        self._gather(logits)
        return self._sample_complete(logits, inputs)

    def _sample_complete(self, logits: torch.Tensor, inputs: SampleInputs) -> Sampled:
        params, sampler = inputs.params, self._sampler
        share = RowShare.of(len(params), self._communicator.shard)
        own = params[share.own]
        raw = sampler.raw_logprobs(logits[share.own], own)
        reports = bool(len(wants_logprobs(params)))
        if inputs.edits is not None:
            self._edit(logits, inputs.edits, are_read=reports)
        picked = sampler.pick(logits[share.own], draw_records(own, inputs.positions[share.own], sampler.vocab_size))
        found = share.exchange(self._communicator, _founds(picked.tokens, picked.best))
        tokens, failed = found["token"].astype(np.int64), failures(found["best"])
        if not reports:
            return Sampled(tokens, failed, None)
        rows = range(share.own.start, share.own.stop)
        named = {sample - rows.start: ids for sample, ids in (inputs.named or {}).items() if sample in rows}
        records = sampler.find_logprobs(raw, tokens[share.own], own, sampler.most_top(params), named)
        records = share.exchange(self._communicator, records)
        is_first = self._communicator.shard.rank == 0
        return Sampled(tokens, failed, listed(records, params, failed) if is_first else None)

    def _best(self, logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:  # [num_samples] each
        """Take each row's best token of all ranks' columns, and its logit."""
        if self._communicator.shares_memory and logits.numel() <= FEW_LOGITS:
            self._gather(logits)
            picked = self._sampler.pick_best(logits)
            self._communicator.barrier()
            return picked.tokens, picked.best
        picked = self._sampler.pick_best(logits, self._own_columns)
        own = _founds(picked.tokens + self._own_columns.start, picked.best)
        of_ranks = exchange(self._communicator, own, len(own))
        # Equals go to the lowest rank, which has the lowest ids; NaN goes before all others, as within a rank.
        found = of_ranks[of_ranks["best"].argmax(0), np.arange(len(logits))]
        return found["token"].astype(np.int64), found["best"]

    def _edit(self, logits: torch.Tensor, edits: LogitEdits, *, are_read: bool) -> None:
        """Apply the rules to complete logits. `are_read`: ranks have read the logits since they were gathered."""
        is_first, shares_memory = self._communicator.shard.rank == 0, self._communicator.shares_memory
        if shares_memory and are_read:
            self._communicator.barrier()
        if is_first or not shares_memory:
            edits.apply(logits)
        if shares_memory:
            self._communicator.barrier()


def _founds(tokens: NDArray[np.int64], best: NDArray[np.float32]) -> Founds:  # all [num_rows]
    found = np.empty(len(tokens), FOUND)
    found["token"], found["best"] = tokens, best
    return found
