"""The sampler's kernel against its plain twin, as named functions of a launcher and a device; no pytest in here.

The plain twin always runs on the CPU. Filters are compared bit for bit. A token may differ from the plain one's only
where two scores are equal up to the last bits of the noise, in which devices differ.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kernels.cases import Case
from vllm_lite.kernels.cuda import sampler
from vllm_lite.kernels.cuda.launcher import Launcher
from vllm_lite.kernels.sampling import DRAW, Picked
from vllm_lite.worker.sampling.sampler import Sampler, gumbel_noise, masses, row_keys, scramble, token_hash

INF = float("inf")
ROWS_OF_NOISE = [(0, 0, 0), (1, 0, 5), (2**32, 1, 5), (2**64 - 1, 2**32 - 1, 2**31), (0xDEADBEEF12345678, 3, 77)]
NEAR = 1e-5


def make_draws(num_rows: int, vocab: int, temperature: float = 1.0) -> NDArray[np.void]:
    draws = np.zeros(num_rows, DRAW)
    draws["seed"] = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    draws["sample"], draws["position"] = np.arange(num_rows) % 3, 100 + np.arange(num_rows)
    draws["temperature"], draws["top_k"], draws["top_p"], draws["max_distance"] = temperature, vocab, 1, INF
    return draws


def normal(num_rows: int, vocab: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def assert_picked(picked: Picked, logits: torch.Tensor, draws: NDArray[np.void]) -> None:
    """Compare with the plain twin: the largest logit and the limit bit for bit, the token up to ties."""
    plain = Sampler(logits.shape[1], torch.device("cpu")).pick_plainly(logits, draws)
    np.testing.assert_array_equal(picked.best.view(np.uint32), plain.best.view(np.uint32))
    finite = np.isfinite(plain.best)
    np.testing.assert_array_equal(picked.limits[finite].view(np.uint32), plain.limits[finite].view(np.uint32))
    for row in np.flatnonzero((picked.tokens != plain.tokens) & finite):
        assert draws[row]["temperature"] > 0
        scores = exact_scores(logits[row], draws[row])
        assert scores[plain.tokens[row]] - scores[picked.tokens[row]] < NEAR
        assert (logits[row].max() - logits[row, picked.tokens[row]]) / draws[row]["temperature"] <= plain.limits[row]


def exact_scores(logits: torch.Tensor, draw: np.void) -> NDArray[np.float64]:
    hashes = plain_hashes(int(draw["seed"]), int(draw["sample"]), int(draw["position"]), len(logits))
    v = ((hashes & 0x7FFFFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(float.fromhex("0x1.fffffep-32"))
    noise = -np.log(-np.log1p(-v.astype(np.float64)))
    scores: NDArray[np.float64] = noise + (logits - logits.max()).double().numpy() / float(draw["temperature"])
    return scores


def plain_keys(seed: int, sample: int, position: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = row_keys(np.array([seed], np.uint64), np.array([sample], np.uint32), np.array([position], np.uint32))
    tokens = scramble(np.arange(vocab, dtype=np.uint32))
    return torch.from_numpy(keys.view(np.int32))[:, None], torch.from_numpy(tokens.view(np.int32))


def plain_hashes(seed: int, sample: int, position: int, vocab: int) -> NDArray[np.uint32]:
    out, scratch = torch.empty(2, 1, vocab, dtype=torch.int32)
    token_hash(*plain_keys(seed, sample, position, vocab), out, scratch)
    hashes: NDArray[np.uint32] = out[0].numpy().view(np.uint32)
    return hashes


def noise_of_row(
    launcher: Launcher, device: torch.device, seed: int, sample: int, position: int, vocab_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:  # both [vocab]
    """The hash and the noise of every token of one row."""
    hashes = torch.empty(vocab_size, dtype=torch.int32, device=device)
    values = torch.empty(vocab_size, dtype=torch.float32, device=device)
    args = (np.uint64(seed), np.uint32(sample), np.uint32(position), np.int32(vocab_size), hashes, values)
    launcher.kernel(sampler.SOURCE, "noise_row")((-(-vocab_size // 256), 1, 1), (256, 1, 1), args)
    return hashes.numpy(force=True).view(np.uint32), values.numpy(force=True)


def masses_of_row(
    launcher: Launcher,
    distances: torch.Tensor,  # float32 [n]
) -> torch.Tensor:  # int64 [n]
    """e^-distance in units of 2^-40, as `pick` counts it."""
    found = torch.empty(len(distances), dtype=torch.int64, device=distances.device)
    args = (distances.contiguous(), np.int32(len(distances)), found)
    launcher.kernel(sampler.SOURCE, "mass_row")((-(-len(distances) // 256), 1, 1), (256, 1, 1), args)
    return found


def noise(launcher: Launcher, device: torch.device) -> None:
    for seed, sample, position in ROWS_OF_NOISE:
        hashes, values = noise_of_row(launcher, device, seed, sample, position, 3001)
        np.testing.assert_array_equal(hashes, plain_hashes(seed, sample, position, 3001))
        plain = gumbel_noise(*plain_keys(seed, sample, position, 3001))[0].numpy()
        np.testing.assert_allclose(values, plain, rtol=1e-6, atol=3e-7)


def mass(launcher: Launcher, device: torch.device) -> None:
    """Distances of every size, where 2^n changes, on both sides of 28, and infinity."""
    steps = torch.arange(20000) * 0.0015
    turns = torch.arange(42) * 0.6931472
    distances = torch.cat((steps, turns, torch.tensor([1e-42, 1e-30, 27.999998, 28.0, 28.000002, 1e30, INF])))
    assert torch.equal(masses_of_row(launcher, distances.to(device)).cpu(), masses(distances))
    assert masses(torch.zeros(1)) == 2**40


def run_pick(launcher: Launcher, device: torch.device, logits: torch.Tensor, draws: NDArray[np.void]) -> None:
    on_device = logits.to(device)
    before = on_device.clone()
    assert_picked(sampler.pick(launcher, on_device, draws), logits, draws)
    assert torch.equal(on_device.view(torch.int32), before.view(torch.int32))


FILTERS = [(k, p, d) for k in (1, 7, 50, None) for p in (0.0, 0.3, 0.95, 0.999999, 1.0) for d in (0.0, 3.5, INF)]


def all_filters(vocab: int, spread: float, temperature: float = 1.0) -> Case:
    """Every combination of filters, each with a row of its own; also a greedy row with filters that do not count."""

    def run(launcher: Launcher, device: torch.device) -> None:
        draws = make_draws(len(FILTERS) + 1, vocab, temperature)
        for row, (k, p, d) in enumerate(FILTERS):
            draws[row]["top_k"] = min(vocab, k or vocab)
            draws[row]["top_p"], draws[row]["max_distance"] = p, d
        draws[-1]["temperature"], draws[-1]["top_k"] = 0, 1
        run_pick(launcher, device, normal(len(draws), vocab, spread), draws)

    return run


def large(launcher: Launcher, device: torch.device) -> None:
    """A real vocabulary, in rows with gaps between them; k is far beyond the tokens that have any mass."""
    vocab = 151936
    draws = make_draws(6, vocab, 0.8)
    draws["top_k"] = (50, vocab, 120000, vocab, vocab - 1, vocab)
    draws["top_p"] = (0.95, 0.9, 0.99, 1.0, 0.5, 1.0)
    draws["temperature"][5] = 0
    wide = torch.full((6, vocab + 12), torch.nan)
    wide[:, :vocab] = normal(6, vocab, 4.0)
    wide[5, [70000, 90000]] = 100.0  # the first of equals
    on_device = wide.to(device)[:, :vocab]
    picked = sampler.pick(launcher, on_device, draws)
    assert_picked(picked, wide[:, :vocab].contiguous(), draws)
    assert picked.tokens[5] == 70000


def adversarial_rows(vocab: int) -> torch.Tensor:
    """Rows that make histograms, ties and rounding work hard."""
    steps = torch.arange(vocab, dtype=torch.float32)
    close = torch.full((vocab,), 1.0)
    close[::3] = torch.nextafter(close[0], torch.tensor(2.0))
    tiny = (steps - 5) * 1e-42  # subnormal distances
    few = torch.full((vocab,), -INF)
    few[[3, 4, 9]] = torch.tensor([1.0, 1.0, -2.0])
    huge = torch.full((vocab,), -3e38)
    huge[7] = 3e38  # the distance of all others is infinite
    edges = -(steps % 300) / 64  # on the borders of the coarse bins, each many times
    far = -30 - steps * 0.01  # at distances where nothing has mass, and behind the last coarse bin
    far[2] = 0.0
    return torch.stack(
        [
            torch.zeros(vocab),
            -torch.zeros(vocab),
            close,
            tiny,
            few,
            huge,
            edges,
            far,
            steps % 2,
            -steps * 1e-3,
            steps * 1e30,
        ]
    )


def adversarial(temperature: float) -> Case:
    def run(launcher: Launcher, device: torch.device) -> None:
        rows = adversarial_rows(1000)
        for top_k, top_p in ((1, 1.0), (2, 0.5), (17, 1.0), (1000, 0.5), (1000, 1e-7), (999, 0.99999), (400, 0.75)):
            draws = make_draws(len(rows), 1000, temperature)
            draws["top_k"], draws["top_p"] = top_k, top_p
            run_pick(launcher, device, rows, draws)

    return run


def just_not_enough(launcher: Launcher, device: torch.device) -> None:
    """The best token falls short of top_p by a fraction of a unit of mass: the second is kept too."""
    logits = torch.tensor([[0.0, -0.5194079875946045], [-0.6643829941749573, 0.0]])
    draws = make_draws(2, 2)
    draws["top_p"] = 0.6270093321800232, 0.6602442860603333
    picked = sampler.pick(launcher, logits.to(device), draws)
    np.testing.assert_array_equal(picked.limits, [logits[0].max() - logits[0].min(), logits[1].max() - logits[1].min()])
    assert_picked(picked, logits, draws)


def not_finite(launcher: Launcher, device: torch.device) -> None:
    """Such rows say so in their largest logit; the others do not notice."""
    logits = normal(7, 300, 2.0)
    logits[0, 299], logits[1, 0], logits[2, 5], logits[3] = torch.nan, torch.nan, INF, -INF
    logits[4, 1:] = -INF
    logits[5, 10], logits[5, 20] = INF, torch.nan
    for temperature in (0.0, 1.0):
        draws = make_draws(7, 300, temperature)
        draws["top_k"], draws["top_p"] = 20, 0.9
        picked = sampler.pick(launcher, logits.to(device), draws)
        assert np.isnan(picked.best[[0, 1, 5]]).all()
        assert picked.best[2] == INF
        assert picked.best[3] == -INF
        assert picked.tokens[4] == 0
        assert ((picked.tokens >= 0) & (picked.tokens < 300)).all()
        good = [4, 6]
        kept = Picked(picked.tokens[good], picked.best[good], picked.limits[good])
        assert_picked(kept, logits[good], draws[good])


def in_parts(vocab: int, parts: int) -> Case:
    """Blocks that share a row give the bits of one block: every filter, ties, rows that are not finite, greedy rows."""

    def run(launcher: Launcher, device: torch.device) -> None:
        hard = adversarial_rows(vocab)
        broken = normal(4, vocab, 2.0)
        broken[0, vocab - 1], broken[1, 0], broken[2], broken[3, vocab // 2] = torch.nan, torch.nan, -INF, INF
        logits = torch.cat((normal(20, vocab, 3.0), hard, broken)).to(device)
        draws = make_draws(len(logits), vocab, 0.9)
        for row, (k, p, d) in enumerate(FILTERS[:: len(FILTERS) // 34 + 1] * 3):
            if row < len(draws):
                draws[row]["top_k"] = min(vocab, k or vocab)
                draws[row]["top_p"], draws[row]["max_distance"] = p, d
        draws["temperature"][::7] = 0
        for kept in (np.ones(len(draws), bool), draws["temperature"] == 0, draws["top_k"] == vocab):
            some, rows = draws[kept].copy(), logits[torch.from_numpy(np.flatnonzero(kept)).to(device)]
            if kept.all():
                some["top_p"][1] = 0.9
            else:
                some["top_p"] = 1.0  # then no histogram is needed, and none is made
            found = [sampler.pick_on_device(launcher, rows, some, parts=count) for count in (1, parts)]
            assert torch.equal(*found)

    return run


def shared_rows(launcher: Launcher, device: torch.device) -> None:
    """Blocks share one row of a real vocabulary by default."""
    vocab = 128256
    assert sampler.parts_for(1, vocab) == sampler.MAX_PARTS
    assert (sampler.parts_for(64, vocab), sampler.parts_for(1, 4000)) == (1, 1)
    draws = make_draws(1, vocab, 0.8)
    draws["top_k"], draws["top_p"] = 50, 0.95
    run_pick(launcher, device, normal(1, vocab, 4.0), draws)


def small_vocabularies(launcher: Launcher, device: torch.device) -> None:
    for vocab in (1, 2, 5, 1023, 1025):
        draws = make_draws(4, vocab)
        draws["top_k"], draws["top_p"] = (1, vocab, vocab, max(1, vocab - 1)), (0.5, 0.5, 1.0, 1.0)
        run_pick(launcher, device, normal(4, vocab, 2.0), draws)
    assert len(sampler.pick(launcher, torch.empty(0, 5, device=device), make_draws(0, 5)).tokens) == 0


def batch_does_not_count(launcher: Launcher, device: torch.device) -> None:
    logits, draws = normal(12, 500, 3.0), make_draws(12, 500)
    draws["top_k"], draws["top_p"] = (500, 40, 500) * 4, (1.0, 0.9) * 6
    together = sampler.pick(launcher, logits.to(device), draws)
    order = np.random.default_rng(1).permutation(12)
    permuted = sampler.pick(launcher, logits[order].to(device), draws[order])
    alone = sampler.pick(launcher, logits[3:4].to(device), draws[3:4])
    for name in Picked._fields:
        np.testing.assert_array_equal(getattr(together, name)[order], getattr(permuted, name))
        np.testing.assert_array_equal(getattr(together, name)[3:4], getattr(alone, name))


def distribution(launcher: Launcher, device: torch.device) -> None:
    """Chi-square of 150 draws, of which top_p keeps three tokens of five."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    draws = make_draws(150, 5)
    draws["position"] = np.arange(150)
    draws["top_p"] = 0.85
    tokens = sampler.pick(launcher, logits.expand(150, 5).contiguous().to(device), draws).tokens
    counts = np.bincount(tokens, minlength=5)
    assert counts[3] == counts[4] == 0
    expected = 150 * np.array([4, 3, 2]) / 9
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8  # exceeded once in 1000 times, with other seeds


CASES: list[tuple[str, Case]] = [
    ("noise", noise),
    ("mass", mass),
    ("filters", all_filters(1000, 3.0)),
    ("filters_odd_vocabulary", all_filters(1003, 1.0)),
    ("filters_wide", all_filters(256, 20.0)),
    ("filters_hot", all_filters(600, 1.0, temperature=100.0)),
    ("filters_cold", all_filters(600, 1.0, temperature=0.01)),
    ("large", large),
    ("adversarial", adversarial(1.0)),
    ("adversarial_hot", adversarial(3.0)),
    ("just_not_enough", just_not_enough),
    ("not_finite", not_finite),
    ("in_parts", in_parts(1000, 3)),
    ("in_parts_odd_vocabulary", in_parts(1003, 7)),
    ("in_parts_of_little", in_parts(30, 6)),
    ("shared_rows", shared_rows),
    ("small_vocabularies", small_vocabularies),
    ("batch_does_not_count", batch_does_not_count),
    ("distribution", distribution),
]
