"""From logits to tokens. A draw depends on its logits and on (seed, child, position) alone: never on batch or row.

Random rows are drawn by the Gumbel-max trick: the token with the largest `logit / temperature + noise` is a draw from
the softmax. The noise of a token is a function of exactly four integers, so that a resubmitted, preempted or
differently batched request repeats itself. The same function runs on every device; it is defined here:

    scramble(k)  = rotl(k * 0xcc9e2d51, 15) * 0x1b873593
    mix(h, k)    = rotl(h ^ scramble(k), 13) * 5 + 0xe6546b64
    finish(h)    = h ^= h >> 16, h *= 0x85ebca6b, h ^= h >> 13, h *= 0xc2b2ae35, h ^= h >> 16
    h0           = low32(seed) ^ 0x9e3779b9
    hash         = finish(mix(mix(mix(mix(h0, high32(seed)), child), position), token))
    v            = (float32(hash & 0x7fffffff) + 0.5) * float32(0x1.fffffep-32)
    noise        = -log(-log1p(-v))

in unsigned 32-bit integers (Murmur3's rounds) and IEEE float32. v lies in [2^-32, 1 - 2^-24], so u = 1 - v lies
strictly inside (0, 1) and noise = -log(-log(u)); it is computed from v because the largest noise, which decides most
draws, comes from u next to 1, where float32 has no precision left.

Filters, in this order: top_k; top_p of the mass of the k best; min_p of the largest probability. Each is a least
logit, so equals of the last one kept stay in.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import sampler as native
from vllm_lite.protocol.api import TokenLogprobs
from vllm_lite.protocol.params import GREEDY_BELOW

NO_LOGPROBS = -1
ROW_PARAMS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),  # 0 = off
        ("top_p", np.float32),  # 1 = off
        ("min_p", np.float32),  # 0 = off
        ("seed", np.uint64),
        ("child", np.uint32),
        ("logprobs", np.int16),  # how many of the most likely tokens to report, NO_LOGPROBS = no logprobs at all
        ("min_tokens_until", np.int32),  # sequence length before which stop ids are banned, 0 = no such rule
    ]
)
"""What the sampler knows of one sequence; arrays of it have one record per row."""

NEVER = -float("inf")
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
ALL_BANNED = "every token is ruled out"
CACHED_ENTRIES = 2**17
"""Entries of noise made at a time; with its scratch memory that is 1.5 MiB."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What the sampler is told of the sequences that sample, in the order of the rows of logits."""

    params: NDArray[np.void]  # ROW_PARAMS [num_samples]
    positions: NDArray[np.int64]  # [num_samples], index in its sequence of the token about to be sampled
    banned: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # (sample, token id) pairs, both [num_banned]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result, row by row. The token of a failed row means nothing."""

    tokens: NDArray[np.int64]  # [num_samples]
    failed: dict[int, str]  # sample -> reason
    logprobs: list[TokenLogprobs | None] | None  # [num_samples], or None if nobody asked


class Sampler:
    """Samples rows of logits over one vocabulary. Keeps nothing between calls but a table of the token ids."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        tokens = np.arange(vocab_size, dtype=np.uint32)
        self._token_keys = torch.from_numpy(scramble(tokens).view(np.int32)).to(device)  # int32 [vocab]

    def sample(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab]; bans and filters write -infinity into it
        inputs: SampleInputs,
    ) -> Sampled:
        """One token per row. A row whose logits are not finite is reported as failed; no other row notices."""
        params = inputs.params
        wanted = np.flatnonzero(params["logprobs"] != NO_LOGPROBS)
        raw = logits.index_select(0, self._index(wanted)).log_softmax(1) if len(wanted) else None
        if inputs.banned is not None:
            samples, ids = (self._index(array) for array in inputs.banned)
            logits[samples, ids] = NEVER
        tokens = _argmax(logits)  # int64 [num_samples]
        best = logits.gather(1, tokens[:, None])  # [num_samples, 1], NaN if the row has one
        random = np.flatnonzero(params["temperature"] >= GREEDY_BELOW)
        if len(random):
            tokens[self._index(random)] = self._draw(logits, best, inputs, random)
        picked = tokens.numpy(force=True)
        failed = _failures(best.squeeze(1).numpy(force=True))
        if raw is None:
            return Sampled(picked, failed, None)
        logprobs: list[TokenLogprobs | None] = [None] * len(picked)
        reports = _report(raw, tokens[self._index(wanted)], params["logprobs"][wanted])
        for sample, report in zip(wanted.tolist(), reports, strict=True):
            logprobs[sample] = None if sample in failed else report
        return Sampled(picked, failed, logprobs)

    def _draw(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab]
        best: torch.Tensor,  # float32 [num_samples, 1], the largest of each row
        inputs: SampleInputs,
        rows: NDArray[np.int64],  # [num_random]
    ) -> torch.Tensor:  # int64 [num_random]
        """Random tokens for `rows`, after their filters."""
        params = inputs.params[rows]
        limited_k = (params["top_k"] > 0) & (params["top_k"] < self.vocab_size)
        filtered = np.flatnonzero(limited_k | (params["top_p"] < 1) | (params["min_p"] > 0))
        if len(filtered):
            self._filter(logits, best, params[filtered], rows[filtered])
        positions = inputs.positions[rows].astype(np.uint32)
        if logits.device.type == "cpu" and cpu.available():
            return native.draw(logits, _draw_records(params, positions, rows, best.numpy()[rows, 0]))
        keys = row_keys(params["seed"], params["child"], positions)
        scores = _scaled(logits, best, self._index(rows), self._column(params["temperature"]))
        scores += gumbel_noise(self._column(keys.view(np.int32)), self._token_keys)
        return _argmax(scores)

    def _filter(
        self,
        logits: torch.Tensor,  # float32 [num_samples, vocab]
        best: torch.Tensor,  # float32 [num_samples, 1]
        params: NDArray[np.void],  # ROW_PARAMS [num_filtered]
        rows: NDArray[np.int64],  # [num_filtered]
    ) -> None:
        """Rule out, in `logits`, what does not pass the filters of `rows`."""
        index = self._index(rows)
        scaled = _scaled(logits, best, index, self._column(params["temperature"]))
        kept = logits.index_select(0, index).masked_fill_(scaled < self._floor(scaled, params), NEVER)
        logits.index_copy_(0, index, kept)

    def _floor(
        self,
        scaled: torch.Tensor,  # float32 [num_filtered, vocab], largest 0
        params: NDArray[np.void],  # ROW_PARAMS [num_filtered]
    ) -> torch.Tensor:  # float32 [num_filtered, 1]
        """The least scaled logit that passes a row's filters. Only rows with top_k or top_p are sorted."""
        with np.errstate(divide="ignore"):
            floor = self._column(np.log(params["min_p"]))
        ordered = np.flatnonzero((params["top_k"] > 0) | (params["top_p"] < 1))
        if len(ordered):
            index = self._index(ordered)
            top_k = np.where(params["top_k"] > 0, params["top_k"], self.vocab_size)[ordered]
            ranked = self._ranked_floor(
                scaled.index_select(0, index), np.minimum(top_k, self.vocab_size), params["top_p"][ordered]
            )
            floor[index] = torch.maximum(floor[index], ranked)
        return floor

    def _ranked_floor(
        self,
        scaled: torch.Tensor,  # float32 [num_ordered, vocab], largest 0
        top_k: NDArray[np.int32],  # [num_ordered], 1 to vocab
        top_p: NDArray[np.float32],  # [num_ordered]
    ) -> torch.Tensor:  # float32 [num_ordered, 1]
        """The logit of the last token within top_k and then within top_p.

        Sums run from the most likely token down, in float64: a row's result does not depend on how many entries the
        other rows of the batch make it carry behind its own k. Those hold at least the total, so they do not count.
        """
        best = _largest(scaled, int(top_k.max()))  # [num_ordered, width], descending
        k, p = self._column(top_k.astype(np.int64)), self._column(top_p.astype(np.float64))
        mass = best.exp().cumsum(1, dtype=torch.float64)
        within_p = (mass < p * mass.gather(1, k - 1)).sum(1, keepdim=True) + 1
        return best.gather(1, torch.where(p < 1, within_p, k) - 1)

    def _index(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _column(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)[:, None]


# ---- the hash


def scramble(keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    keys = keys * np.uint32(0xCC9E2D51)
    return (keys << np.uint32(15) | keys >> np.uint32(17)) * np.uint32(0x1B873593)


def row_keys(
    seed: NDArray[np.uint64],  # [n]
    child: NDArray[np.uint32],  # [n]
    position: NDArray[np.uint32],  # [n]
) -> NDArray[np.uint32]:  # [n]
    """The hash's state before the token id is mixed in: everything that is the same for a whole row."""
    state = seed.astype(np.uint32) ^ np.uint32(0x9E3779B9)
    for keys in ((seed >> np.uint64(32)).astype(np.uint32), child, position):
        state = state ^ scramble(keys)
        state = (state << np.uint32(13) | state >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)
    return state


def token_hash(
    row_keys: torch.Tensor,  # int32 [n, 1], from row_keys()
    token_keys: torch.Tensor,  # int32 [vocab], from scramble()
    out: torch.Tensor,  # int32 [n, vocab], the hash, to be read as unsigned
    scratch: torch.Tensor,  # int32 [n, vocab]
) -> None:
    """The last mix and finish() of the hash. int32 wraps around; `>>` copies the sign, so each shift is masked."""

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
    """The noise of every token in every row, as many rows at a time as a cache holds (2 to 3 times faster)."""
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


def _draw_records(
    params: NDArray[np.void],  # ROW_PARAMS [n]
    positions: NDArray[np.uint32],  # [n]
    rows: NDArray[np.int64],  # [n], of the logits
    offsets: NDArray[np.float32],  # [n], the largest logit of each row
) -> NDArray[np.void]:  # native.DRAW [n]
    draws = np.empty(len(rows), native.DRAW)
    draws["row"], draws["position"], draws["offset"] = rows, positions, offsets
    for name in ("seed", "child", "temperature"):
        draws[name] = params[name]
    return draws


def _scaled(
    logits: torch.Tensor,  # float32 [num_samples, vocab]
    best: torch.Tensor,  # float32 [num_samples, 1]
    rows: torch.Tensor,  # int64 [n]
    temperature: torch.Tensor,  # float32 [n, 1]
) -> torch.Tensor:  # float32 [n, vocab]
    """Logits over temperature, the largest of each row 0: so a temperature near 0 does not overflow."""
    return logits.index_select(0, rows).sub_(best[rows]).div_(temperature)


def _argmax(scores: torch.Tensor) -> torch.Tensor:  # [n, vocab] -> int64 [n]
    """The first largest of each row; the first NaN, if there is one."""
    if scores.device.type != "cpu":
        return scores.argmax(1)
    return torch.from_numpy(scores.numpy().argmax(1))


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:  # [n, vocab] -> [n, count]
    """The `count` largest values of each row, descending."""
    if scores.device.type != "cpu":
        return scores.topk(count, dim=1).values
    negated = -scores.numpy()
    if count < negated.shape[1]:
        negated = np.partition(negated, count - 1, axis=1)[:, :count]
    return torch.from_numpy(-np.sort(negated, axis=1))


def _failures(best: NDArray[np.float32]) -> dict[int, str]:
    """Rows that cannot be sampled, by their largest logit."""
    if np.isfinite(best).all():
        return {}
    bad = np.flatnonzero(~np.isfinite(best)).tolist()
    return {sample: ALL_BANNED if best[sample] == NEVER else NOT_FINITE for sample in bad}


def _report(
    logprobs: torch.Tensor,  # float32 [num_wanted, vocab], log-softmax of the raw logits
    tokens: torch.Tensor,  # int64 [num_wanted]
    num_top: NDArray[np.int16],  # [num_wanted]
) -> list[TokenLogprobs]:
    """The sampled token's logprob and rank, and the most likely tokens, most likely first."""
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = ((logprobs > chosen).sum(1) + 1).tolist()
    values, ids = logprobs.topk(min(int(num_top.max()), logprobs.shape[1]), dim=1)
    top = [
        tuple(zip(row_ids[:count], row_values[:count], strict=True))
        for row_ids, row_values, count in zip(ids.tolist(), values.tolist(), num_top.tolist(), strict=True)
    ]
    return [TokenLogprobs(*row) for row in zip(chosen.squeeze(1).tolist(), ranks, top, strict=True)]
