"""Any configuration, any arrivals: the same tokens, one end each, and every block free at last."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cached_contents import CachedContents
from tests.scheduler_rig import VOCAB, Rig, expected
from vllm_lite.engine.policy import Deadline, Fair, Priority

configurations = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 40),
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "caching": st.booleans(),
        "windows": st.sampled_from([(None,), (None,), (5,), (8,), (None, 6), (None, 3, 9), (None, 6, 6)]),
        "num_host_blocks": st.sampled_from([0, 3, 12, 60]),
        "max_swap_blocks": st.sampled_from([1, 2, 5, 10**9]),
        "preemption": st.sampled_from(["recompute", "swap", "swap"]),
        "num_state_slots": st.sampled_from([0, 0, 2, 3, 5, 9, 40]),
        "num_host_states": st.sampled_from([0, 1, 3, 20]),
        "depth": st.sampled_from([1, 2, 4]),
        "num_drafts": st.sampled_from([0, 0, 3]),
        "num_forced": st.sampled_from([0, 2, 5]),
        "policy": st.sampled_from([lambda: None, lambda: None, Priority, Deadline, Fair]).map(lambda make: make()),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 40),
    }
)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), configuration=configurations)
def test_any_schedule_gives_the_same_tokens(seed: int, configuration: dict[str, object]) -> None:
    """Random arrivals, aborts, samples, shared prefixes, resets and deaths on tiny pools: every slot read is the
    reader's own history, every block that can be found holds what its hash says, every sample gets exactly its tokens
    and one end, and at last every block is free."""
    rng = random.Random(seed)
    rig = Rig(**configuration)  # type: ignore[arg-type]
    cached = CachedContents(rig.kv)
    rig.worker.is_compiling = lambda: rng.random() < 0.5
    wanted: dict[tuple[str, int], list[int]] = {}
    aborted = set()
    longest = min(rig.scheduler.max_len - 1, 60)
    for index in range(25):
        if longest >= 1 and rng.random() < 0.7:
            prompt = [rng.choice([1, 2])] * rng.randint(1, longest)
            prompt[rng.randrange(len(prompt)) :] = [rng.randrange(VOCAB)] * rng.randint(0, 3)
            prompt = (prompt or [1])[:longest]
            max_tokens = rng.randint(1, min(20, rig.scheduler.max_len - len(prompt)))
            stop = frozenset(rng.sample(range(VOCAB), 3))
            samples = rng.choice([1, 1, 1, 2, 4])
            place = {"priority": rng.randint(0, 3), "user": rng.choice("xyz")}
            marks = tuple(sorted(rng.sample(range(len(prompt) + 1), min(3, len(prompt)))))
            grammar = rng.choice([None, "any"])
            rig.add(f"r{index}", prompt, max_tokens, stop, None, marks, n=samples, grammar=grammar, **place)
            for sample in range(samples):
                wanted[f"r{index}", sample] = expected(prompt, max_tokens, stop, sample)
        if rng.random() < 0.1 and rig.scheduler.requests:
            name = rng.choice(list(rig.scheduler.requests))
            rig.scheduler.queues.end(rig.scheduler.requests[name], "abort", forget=rng.random() < 0.3)
            aborted.add(name)
        if rng.random() < 0.04:
            rig.scheduler.reset_prefix_cache()
        if rng.random() < 0.04:
            rig.restart_workers()
            rig.worker.is_compiling = lambda: rng.random() < 0.5
        for _ in range(rng.randint(0, 3)):
            rig.step()
            cached.check(rig.worker)
    rig.drain()
    for key, tokens in wanted.items():
        if key[0] in aborted:
            assert tokens[: len(rig.outputs.get(key, []))] == rig.outputs.get(key, [])
        else:
            assert rig.outputs[key] == tokens
            assert key in rig.reasons
