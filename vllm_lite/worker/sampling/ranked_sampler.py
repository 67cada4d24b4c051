"""Sampling over several ranks and stages.

With tensor parallelism each rank has the logits of its own vocabulary columns, and each needs all sampled tokens,
because each keeps the sequences.

- If all rows take their best token, each rank finds the best of its columns, and the ranks exchange these, 8 bytes per
  row, without the logits. Few logits in shared memory are read in full by all ranks instead.
- Otherwise the logits are completed. The ranks divide the rows and exchange the tokens; if there are fewer rows than
  ranks, all ranks sample all rows, and rank 0's tokens count. Rules change all columns: rank 0 applies them to logits
  in shared memory, and each rank to its own copy.

Each rank looks up the logprobs of its rows; only rank 0 reports them. Given equal inputs, all ranks get equal tokens
and failures.

Every step that samples ends with an exchange or a barrier on the CPU, so that logits computed while another rank died,
which may be wrong, do not become tokens.

In shared memory, no rank may write what another still reads or writes:

- Rank 0 applies rules when all columns are complete (`gather`), and the others read them after a barrier. If rows
  report logprobs, which are of the logits before rules, another barrier precedes the rules.
- The next step writes logits into the same memory. Each rank has finished reading before the last exchange or barrier,
  which no rank leaves before all have reached it.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels.cuda.patience import PATIENCE_S
from vllm_lite.models.registry import Model
from vllm_lite.parallel.communicator import Communicator
from vllm_lite.parallel.stages import take_from_last
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

FOUND = np.dtype([("best", np.float32), ("token", np.int32)])
"""Record that ranks exchange per row: its largest logit (NaN if any is NaN), and the picked token."""
FEW_LOGITS = 1 << 18
"""Up to this many logits in shared memory are read in full by every rank: that takes at most 30 us, and two barriers
take less than an exchange (one row of 32,000 or 152,000 logits, two ranks: 6 or 14 us instead of 27 or 52)."""

Founds = NDArray[np.void]


def sampler_of(model: Model, device: torch.device, patience_s: float = PATIENCE_S) -> TokenSampler:
    """The sampler for this rank: a plain Sampler if there is only one rank. `patience_s`: see Sampler."""
    communicator, sampler = model.communicator, Sampler(model.spec.vocab_size, device, patience_s)
    ranked: TokenSampler = sampler
    if communicator.shard.world > 1:
        ranked = RankedSampler(sampler, communicator, model.own_columns, model.gather_logits)
    return ranked if communicator.shard.stage.count == 1 else StagedSampler(ranked, communicator)


class RankedSampler:
    """Samples together with the other ranks, with the same results as Sampler."""

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
        failed, without affecting others. Logprobs are None on all ranks but the first."""
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
        """Best token of each row over all ranks' columns, and its logit."""
        if self._communicator.shares_memory and logits.numel() <= FEW_LOGITS:
            self._gather(logits)
            picked = self._sampler.pick_best(logits)
            self._communicator.barrier()
            return picked.tokens, picked.best
        picked = self._sampler.pick_best(logits, self._own_columns)
        own = _founds(picked.tokens + self._own_columns.start, picked.best)
        of_ranks = exchange(self._communicator, own, len(own))
        # Ties go to the lowest rank, which has the lowest ids; NaN wins over all numbers, as within a rank.
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


class StagedSampler:
    """Samples by `last` in the last stage, and broadcasts the tokens to the other stages, token t of a failed row as
    -1 - t. Only the last stage, whose first rank answers, has logprobs and the reasons of failures."""

    def __init__(self, last: TokenSampler, communicator: Communicator) -> None:
        self._last = last
        self._communicator = communicator

    def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> Sampled:
        """See TokenSampler.sample. `logits` have no columns except in the last stage."""
        if not self._communicator.shard.stage.is_last:
            sent = np.empty(len(inputs.params), np.int64)
            take_from_last(torch.from_numpy(sent), self._communicator)
            failed = dict.fromkeys(np.flatnonzero(sent < 0).tolist(), "it failed in the last stage")
            return Sampled(np.maximum(sent, -1 - sent), failed, None)
        sampled = self._last.sample(logits, inputs)
        sent = np.array(sampled.tokens, np.int64)
        sent[list(sampled.failed)] = -1 - sent[list(sampled.failed)]
        take_from_last(torch.from_numpy(sent), self._communicator)
        return sampled


def _founds(tokens: NDArray[np.int64], best: NDArray[np.float32]) -> Founds:  # all [num_rows]
    found = np.empty(len(tokens), FOUND)
    found["token"], found["best"] = tokens, best
    return found
