"""Workers that share out experts, as processes: the tokens of one, and the load of all experts."""

from pathlib import Path

from tests.e2e.reference import GREEDY, NUM_TOKENS, make_prompts, start, tokens_of
from tests.families.mixtures import qwen3
from tests.http_server import until

PROMPTS = make_prompts([1, 7, 33, 64], seed=3)


def test_two_processes_share_out_the_experts(tmp_path: Path) -> None:
    path = qwen3("mixture", {}, mlp_only_layers=[1]).make(tmp_path / "mixture")
    with start(path, expert_load_metrics=True, max_num_batched_tokens=64) as alone:
        expected = tokens_of(alone.generate(PROMPTS, GREEDY))
        until(lambda: counted(alone.stats().expert_tokens), "the load")
        of_one = alone.stats().expert_tokens
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "single_process": False}
    with start(path, expert_load_metrics=True, max_num_batched_tokens=64, **settings) as shared:
        assert tokens_of(shared.generate(PROMPTS, GREEDY)) == expected
        until(lambda: shared.stats().expert_tokens == of_one, "the load")


def counted(expert_tokens: list[list[int]] | None) -> bool:
    """Whether all that was computed has been reported: each token but the last of a request, by 3 experts."""
    num_computed = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)
    return expert_tokens is not None and bool(expert_tokens) and sum(expert_tokens[0]) == 3 * num_computed
