"""From logits to tokens. A draw depends on its logits and on (seed, sample, position) alone: never on batch or row.

First the logprobs are taken, of the logits as the model made them. Then rules change logits: logit_rules.py says in
which order. Then temperature and filters, below.

Random rows are drawn by the Gumbel-max trick: the token with the largest `logit / temperature + noise` is a draw from
the softmax. The noise of a token is a function of exactly four integers, so that a resubmitted, preempted or
differently batched request repeats itself. The same function runs on every device; it is defined here:

    scramble(k)  = rotl(k * 0xcc9e2d51, 15) * 0x1b873593
    mix(h, k)    = rotl(h ^ scramble(k), 13) * 5 + 0xe6546b64
    finish(h)    = h ^= h >> 16, h *= 0x85ebca6b, h ^= h >> 13, h *= 0xc2b2ae35, h ^= h >> 16
    h0           = low32(seed) ^ 0x9e3779b9
    hash         = finish(mix(mix(mix(mix(h0, high32(seed)), sample), position), token))
    v            = (float32(hash & 0x7fffffff) + 0.5) * float32(0x1.fffffep-32)
    noise        = -log(-log1p(-v))

in unsigned 32-bit integers (Murmur3's rounds) and IEEE float32. v lies in [2^-32, 1 - 2^-24], so u = 1 - v lies
strictly inside (0, 1) and noise = -log(-log(u)); it is computed from v because the largest noise, which decides most
draws, comes from u next to 1, where float32 has no precision left.

Filters, in this order: top_k; top_p of the mass of the k best; min_p of the largest probability. Each is a greatest
distance from the best token, so equals of the last one kept stay in. Every implementation finds the same tokens, bit
for bit: all sums are of integers, so their order does not matter, and each float32 operation below is rounded by itself
(no fused multiply-add), to nearest even.

    best         = the largest logit
    distance     = |(best - logit) / temperature|     a correctly rounded division; its bits, as integers, order it

    y            = min(distance, 28) * -1.44269504f   e^-distance = 2^y
    n            = y rounded to a whole number, halves to even
    f            = y - n
    e            = (((((c6 * f + c5) * f + c4) * f + c3) * f + c2) * f + c1) * f + 1, times 2^n (exact)
                   c1 to c6 = 6.9314718e-1f 2.4022651e-1f 5.5504109e-2f 9.6181291e-3f 1.3333558e-3f 1.5403530e-4f
    mass         = floor(e * 2^40)                    unsigned 64-bit, 2^40 for the best token, 0 from distance 28 on

    within_k     = the k-th smallest distance; infinity if top_k is 0 or at least the vocabulary's size
    total        = sum of the mass of the k best: of all tokens below within_k, and as many at it as fill up k
    wanted       = ceil(float64(top_p) * float64(total))
    within_p     = the least distance d of a token such that the mass of all tokens with distance <= d is at least
                   `wanted`, and at most within_k; within_k if top_p is 1
    within_min_p = float32(-log(float64(min_p))); infinity if min_p is 0
    kept         = distance <= min(within_p, within_min_p)

and the draw is the first token with the largest `noise - distance` among the kept. The integers are as good as exact
numbers: mass has a relative error of 1.2e-6 at most, and an absolute one of 2^-40 of the best token's, so top_p keeps
another token than exact arithmetic only where the exact sum misses top_p * total by less than 1e-6 of total or so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.kernels.cuda import sampler as cuda_sampler
from vllm_lite.kernels.cuda.cupy_launcher import default_launcher
from vllm_lite.kernels.cuda.patience import PATIENCE_S
from vllm_lite.kernels.sampling import DRAW, Picked
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.params import Sampling
from vllm_lite.protocol.step import NOT_FINITE
from vllm_lite.worker.sampling.logit_rules import LogitEdits
from vllm_lite.worker.sampling.logprobs import find, record_of, report
from vllm_lite.worker.sampling.masks import NEVER

NO_LOGPROBS = -1
ROW_PARAMS = np.dtype(
    [
        ("temperature", np.float32),  # 0 = greedy
        ("top_k", np.int32),  # 0 = off
        ("top_p", np.float32),  # 1 = off
        ("min_p", np.float32),  # 0 = off
        ("seed", np.uint64),
        ("sample", np.uint32),
        ("logprobs", np.int16),  # how many of the most likely tokens to report, NO_LOGPROBS = no logprobs at all
        ("is_named", np.bool_),  # these are not the most likely tokens, but some that the request names
        ("rules", np.int32),  # entry in the RuleBook, 0 = no rules
    ]
)
"""Sampling parameters of one sequence; arrays have one record per row."""

ALL_BANNED = "every token is ruled out"
LOG2_E = 1.44269504
COEFFICIENTS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
"""c6 to c0 of the mass."""
CACHED_ENTRIES = 2**17
"""Entries of noise computed at a time; with scratch memory 1.5 MiB."""


class HasSampling(Protocol):
    """A sequence with sampling parameters."""

    sampling: Sampling


@dataclass(slots=True)
class SampleInputs:
    """Inputs of the sampler, in the order of the rows of logits. The sampler does not change them."""

    params: NDArray[np.void]  # ROW_PARAMS [num_samples]
    positions: NDArray[np.int64]  # [num_samples], index in its sequence of the token about to be sampled
    edits: LogitEdits | None = None
    plain: bool = False
    """True if `is_plain(params)` is known to hold and there are no edits."""
    named: dict[int, tuple[int, ...]] | None = None
    """Sample -> token ids whose logprobs its request names; None: no request names any."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens and logprobs, row by row. The token of a failed row is undefined."""

    tokens: NDArray[np.int64]  # [num_samples]
    failed: dict[int, str]  # sample -> reason
    logprobs: list[TokenLogprobs | None] | None  # [num_samples], or None if no row wants them


class TokenSampler(Protocol):
    """Interface of samplers; Sampler documents the methods."""

    def sample(self, logits: torch.Tensor, inputs: SampleInputs) -> Sampled: ...


class Sampler:
    """Samples rows of logits over one vocabulary. No result depends on the calls before it."""

    def __init__(self, vocab_size: int, device: torch.device, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: seconds that a GPU may take for launched work before DeviceHungError is raised."""
        self.vocab_size = vocab_size
        self.device = device
        self.patience_s = patience_s
        self._launcher = default_launcher() if device.type == "cuda" else None
        self._best_of = native.BestOf()
        tokens = np.arange(vocab_size, dtype=np.uint32)
        self._token_keys = torch.from_numpy(scramble(tokens).view(np.int32)).to(device)  # int32 [vocab]

    def sample(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab]; rules write into it
        inputs: SampleInputs,
    ) -> Sampled:
        """Sample one token per row. A row whose logits are not finite is reported as failed; others are unaffected."""
        params = inputs.params
        if inputs.plain or (inputs.edits is None and is_plain(params)):
            picked = self.pick_best(logits)
            return Sampled(picked.tokens, failures(picked.best), None)
        raw = self.raw_logprobs(logits, params)
        if inputs.edits is not None:
            inputs.edits.apply(logits)
        picked = self.pick(logits, draw_records(params, inputs.positions, self.vocab_size))
        failed = failures(picked.best)
        if raw is None:
            return Sampled(picked.tokens, failed, None)
        found = self.find_logprobs(raw, picked.tokens, params, self.most_top(params), inputs.named)
        return Sampled(picked.tokens, failed, listed(found, params, failed))

    def raw_logprobs(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab], before any rule
        params: NDArray[np.void],  # ROW_PARAMS [num_samples]
    ) -> torch.Tensor | None:  # float32 [num_wanted, vocab]
        """Compute the logprobs of the rows that report some, in memory of their own; None if no row does."""
        wanted = wants_logprobs(params)
        return logits.index_select(0, self._index(wanted)).log_softmax(1) if len(wanted) else None

    def most_top(self, params: NDArray[np.void]) -> int:
        """Largest number of most likely tokens that a row reports."""
        return min(int(params["logprobs"].max(initial=0)), self.vocab_size)

    def find_logprobs(
        self,
        raw: torch.Tensor | None,  # as from raw_logprobs
        tokens: NDArray[np.int64],  # [num_samples], what was sampled
        params: NDArray[np.void],  # ROW_PARAMS [num_samples]
        num_top: int,
        named: dict[int, tuple[int, ...]] | None = None,  # as in SampleInputs
    ) -> NDArray[np.void]:  # record_of(num_top) [num_samples]
        """Find the logprobs that each row reports; zeros for a row that reports none."""
        records = np.zeros(len(params), record_of(num_top))
        if raw is not None:
            wanted = wants_logprobs(params)
            records[wanted] = find(raw, self._index(tokens[wanted]), num_top)
            for sample, ids in (named or {}).items():
                values = raw[int(wanted.searchsorted(sample)), list(ids)]
                records["ids"][sample, : len(ids)] = ids
                records["values"][sample, : len(ids)] = values.numpy(force=True)
        return records

    def pick_best(
        self,
        logits: torch.Tensor,  # float32 [num_rows, vocab]
        columns: slice = native.ALL_COLUMNS,
    ) -> Picked:
        """Take the best of `columns` in each row; token ids count from the first of them. The next call with the same
        logits overwrites the result."""
        if self.device.type != "cpu" or not cpu.available():
            return self.pick(logits[:, columns], np.zeros(len(logits), DRAW))
        return self._best_of(logits, columns)

    def pick(
        self,
        logits: torch.Tensor,  # float32 [num_rows, vocab]
        draws: NDArray[np.void],  # DRAW [num_rows]
    ) -> Picked:
        """Filter and draw by the device's fastest implementation."""
        if self.device.type == "cpu" and cpu.available():
            return native.pick(logits, draws)
        if self._launcher is not None:
            return cuda_sampler.pick(self._launcher, logits, draws, self.patience_s)
        return self.pick_plainly(logits, draws)

    @property
    def leaves_tokens(self) -> bool:
        """Whether launch() is available."""
        return self._launcher is not None

    def launch(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab]
        inputs: SampleInputs,  # without edits, and nobody wants logprobs
    ) -> cuda_sampler.PickedLater:
        """Launch the sampling, and leave the tokens on the device until they are read."""
        if self._launcher is None or inputs.edits is not None:
            raise RuntimeError("this sampler cannot leave its tokens on the device, or rules change the logits")
        draws = draw_records(inputs.params, inputs.positions, self.vocab_size)
        picked = cuda_sampler.pick_on_device(self._launcher, logits, draws)
        return cuda_sampler.PickedLater(picked, self.patience_s)

    def pick_plainly(
        self,
        logits: torch.Tensor,  # float32 [num_rows, vocab]
        draws: NDArray[np.void],  # DRAW [num_rows]
    ) -> Picked:
        """Filter and draw in plain torch: the reference of all other implementations."""
        tokens = _argmax(logits)  # int64 [num_rows]
        best = logits.gather(1, tokens[:, None])  # [num_rows, 1], NaN if the row has one
        limits = np.full(len(draws), np.inf, np.float32)
        random = np.flatnonzero(draws["temperature"])
        if len(random):
            draws, rows = draws[random], self._index(random)
            distances = best[rows].sub(logits[rows]).div_(self._column(draws["temperature"])).abs_()
            limit = self._limits(distances, draws)
            keys = row_keys(draws["seed"], draws["sample"], draws["position"])
            scores = gumbel_noise(self._column(keys.view(np.int32)), self._token_keys)
            tokens[rows] = _argmax(scores.sub_(distances).masked_fill_(distances > limit, NEVER))
            limits[random] = limit.squeeze(1).numpy(force=True)
        return Picked(tokens.numpy(force=True), best.squeeze(1).numpy(force=True), limits)

    def _limits(
        self,
        distances: torch.Tensor,  # float32 [n, vocab]
        draws: NDArray[np.void],  # DRAW [n]
    ) -> torch.Tensor:  # float32 [n, 1]
        """Compute the greatest distance that passes each row's filters. Only rows with top_k or top_p are sorted."""
        limits = self._column(draws["max_distance"])
        ordered = np.flatnonzero((draws["top_k"] < self.vocab_size) | (draws["top_p"] < 1))
        if len(ordered):
            rows, draws = self._index(ordered), draws[ordered]
            ranked = self._ranked_limits(distances[rows], draws["top_k"], draws["top_p"])
            limits[rows] = torch.minimum(limits[rows], ranked)
        return limits

    def _ranked_limits(
        self,
        distances: torch.Tensor,  # float32 [n, vocab]
        top_k: NDArray[np.int32],  # [n], 1 to vocab
        top_p: NDArray[np.float32],  # [n]
    ) -> torch.Tensor:  # float32 [n, 1]
        """Compute within_p of each row, as the head of this file defines it."""
        nearest = _smallest(distances, int(top_k.max()))  # [n, width], ascending
        k, p = self._column(top_k.astype(np.int64)), self._column(top_p.astype(np.float64))
        within_k = nearest.gather(1, k - 1).masked_fill_(k == self.vocab_size, torch.inf)
        sums = masses(nearest).cumsum(1)
        wanted = (p * sums.gather(1, k - 1).double()).ceil().long()
        rank = (sums < wanted).sum(1, keepdim=True).clamp_(max=nearest.shape[1] - 1)  # for a row that is not finite
        return torch.where(p < 1, nearest.gather(1, rank), within_k)

    def _index(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _column(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)[:, None]


def row_params(sampling: Sampling, rules: int) -> tuple[Any, ...]:
    """Convert `sampling` to one record of ROW_PARAMS."""
    return (
        sampling.temperature,
        max(sampling.top_k, 0),
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.sample,
        NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs,
        bool(sampling.logprob_token_ids),
        rules,
    )


def named_tokens(
    params: NDArray[np.void],  # ROW_PARAMS [num_samples]
    rows: NDArray[np.int64],  # [num_samples]
    sequences: Sequence["HasSampling"],  # by row
) -> dict[int, tuple[int, ...]] | None:
    """Sample -> token ids whose logprobs its request names; None if no request names any."""
    if not params["is_named"].any():
        return None
    named = np.flatnonzero(params["is_named"]).tolist()
    return {sample: sequences[rows[sample]].sampling.logprob_token_ids for sample in named}


def is_plain(params: NDArray[np.void]) -> bool:  # ROW_PARAMS [num_samples]
    """Whether every row takes its best token, and no row reports logprobs."""
    return bool((params["temperature"] == 0).all() and (params["logprobs"] == NO_LOGPROBS).all())


def wants_logprobs(params: NDArray[np.void]) -> NDArray[np.int64]:  # ROW_PARAMS [num_samples] -> [num_wanted]
    """Find the rows that report logprobs."""
    return np.flatnonzero(params["logprobs"] != NO_LOGPROBS)


def listed(
    found: NDArray[np.void],  # as from find_logprobs, [num_samples]
    params: NDArray[np.void],  # ROW_PARAMS [num_samples]
    failed: dict[int, str],
) -> list[TokenLogprobs | None]:  # [num_samples]
    """Convert the found logprobs to the form of Sampled."""
    wanted = wants_logprobs(params)
    logprobs: list[TokenLogprobs | None] = [None] * len(params)
    for sample, entry in zip(wanted.tolist(), report(found[wanted], params["logprobs"][wanted]), strict=True):
        logprobs[sample] = None if sample in failed else entry
    return logprobs


def draw_records(
    params: NDArray[np.void],  # ROW_PARAMS [num_samples]
    positions: NDArray[np.int64],  # [num_samples]
    vocab_size: int,
) -> NDArray[np.void]:  # DRAW [num_samples]
    """Make the kernels' records; a filter that would keep every token is turned off."""
    if not params["temperature"].any():
        return np.zeros(len(params), DRAW)
    draws = np.empty(len(params), DRAW)
    for name in ("temperature", "seed", "sample", "top_p"):
        draws[name] = params[name]
    draws["position"] = positions
    top_k = params["top_k"]
    draws["top_k"] = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    with np.errstate(divide="ignore"):
        draws["max_distance"] = np.abs(np.log(params["min_p"].astype(np.float64)))
    return draws


def masses(distances: torch.Tensor) -> torch.Tensor:  # float32 [...] -> int64 [...]
    """Compute e^-distance in units of 2^-40."""
    y = distances.clamp(max=28.0).mul_(-LOG2_E)
    n = y.round()
    f = y.sub_(n)
    e = torch.full_like(f, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        e.mul_(f).add_(coefficient)
    power = n.int().add_(127 + 40).bitwise_left_shift_(23).view(torch.float32)  # 2^(n + 40)
    return e.mul_(power).long()


# ---- the hash


def scramble(keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    keys = keys * np.uint32(0xCC9E2D51)
    return (keys << np.uint32(15) | keys >> np.uint32(17)) * np.uint32(0x1B873593)


def row_keys(
    seed: NDArray[np.uint64],  # [n]
    sample: NDArray[np.uint32],  # [n]
    position: NDArray[np.uint32],  # [n]
) -> NDArray[np.uint32]:  # [n]
    """Compute the hash's state before the token id is mixed in: everything that is the same for a whole row."""
    state = seed.astype(np.uint32) ^ np.uint32(0x9E3779B9)
    for keys in ((seed >> np.uint64(32)).astype(np.uint32), sample, position):
        state = state ^ scramble(keys)
        state = (state << np.uint32(13) | state >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)
    return state


def token_hash(
    row_keys: torch.Tensor,  # int32 [n, 1], from row_keys()
    token_keys: torch.Tensor,  # int32 [vocab], from scramble()
    out: torch.Tensor,  # int32 [n, vocab], the hash, to be read as unsigned
    scratch: torch.Tensor,  # int32 [n, vocab]
) -> None:
    """Compute the last mix and finish() of the hash. int32 wraps around; `>>` copies the sign, so shifts are masked."""

    def shifted_right(bits: int) -> torch.Tensor:
        return torch.bitwise_right_shift(out, bits, out=scratch).bitwise_and_((1 << (32 - bits)) - 1)

    torch.bitwise_xor(row_keys, token_keys, out=out)
    low = shifted_right(19)
    out.bitwise_left_shift_(13).bitwise_or_(low).mul_(5).add_(_signed(0xE6546B64))
    out.bitwise_xor_(shifted_right(16)).mul_(_signed(0x85EBCA6B))
    out.bitwise_xor_(shifted_right(13)).mul_(_signed(0xC2B2AE35))
    out.bitwise_xor_(shifted_right(16))


def gumbel_noise(
    row_keys: torch.Tensor,  # int32 [n, 1]
    token_keys: torch.Tensor,  # int32 [vocab]
) -> torch.Tensor:  # float32 [n, vocab]
    """Compute the noise of every token in every row, for as many rows at a time as a cache holds (2 to 3 x faster)."""
    num_rows, vocab_size = len(row_keys), len(token_keys)
    noise = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=token_keys.device)
    at_once = max(1, CACHED_ENTRIES // vocab_size)
    state, scratch = torch.empty(2, min(at_once, num_rows), vocab_size, dtype=torch.int32, device=token_keys.device)
    for first in range(0, num_rows, at_once):
        rows = noise[first : first + at_once]
        bits = state[: len(rows)]
        token_hash(row_keys[first : first + at_once], token_keys, bits, scratch[: len(rows)])
        rows.copy_(bits.bitwise_and_(0x7FFFFFFF))
        rows.add_(0.5).mul_(-float.fromhex("0x1.fffffep-32")).log1p_().neg_().log_().neg_()
    return noise


def _signed(constant: int) -> int:
    return constant - (1 << 32)


# ---- rows of logits. On a CPU, NumPy's argmax, sort and partition are vectorised and torch's are not (14 to 30 times).


def _argmax(scores: torch.Tensor) -> torch.Tensor:  # [n, vocab] -> int64 [n]
    """Find the first largest of each row; the first NaN, if there is one."""
    if scores.device.type != "cpu":
        return scores.argmax(1)
    return torch.from_numpy(scores.numpy().argmax(1))


def _smallest(scores: torch.Tensor, count: int) -> torch.Tensor:  # [n, vocab] -> [n, count]
    """Find the `count` smallest values of each row, ascending."""
    if scores.device.type != "cpu":
        return scores.topk(count, dim=1, largest=False).values
    values = scores.numpy()
    if count < values.shape[1]:
        values = np.partition(values, count - 1, axis=1)[:, :count]
    return torch.from_numpy(np.sort(values, axis=1))


def failures(best: NDArray[np.float32]) -> dict[int, str]:
    """Find the rows that cannot be sampled, by their largest logit."""
    if np.isfinite(best).all():
        return {}
    bad = np.flatnonzero(~np.isfinite(best)).tolist()
    return {sample: ALL_BANNED if best[sample] == NEVER else NOT_FINITE for sample in bad}
