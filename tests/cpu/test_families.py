"""Every family gives the logits of transformers at every position, however its prompt is cut up and shared out."""

from collections import Counter
from collections.abc import Callable
from copy import copy
from math import prod
from pathlib import Path

import pytest
import torch
import transformers

from tests.checkpoints import transformers_model
from tests.families.all import VARIANTS
from tests.families.latent import round_by_head
from tests.families.variant import Variant
from tests.paged import Oracle, Paged
from tests.thread_group import ThreadCommunicator, ThreadGroup, on_ranks, on_stages
from vllm_lite.attention.cpu import CpuBackend
from vllm_lite.attention.whole_images import WholeImages
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.rank_shapes import rank_shape
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.errors import ConfigError
from vllm_lite.kernels.cpu.library import available
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.models.registry import Sizes, build

MAX_DIFFERENCE = 3e-4
"""Maximum difference of log-probabilities in float32; a wrong model differs by over 0.1 (see the controls).
transformers itself differs by up to 1.6e-4 from its results in float64 (qwen3.5-moe), ours by no more."""


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    made: Variant = request.param
    return made


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Oracle]:
    """Each is made once, and not changed."""
    made: dict[str, Oracle] = {}

    def find(variant: Variant) -> Oracle:
        if variant.name not in made:
            path = variant.make(tmp_path_factory.mktemp("family") / variant.name)
            made[variant.name] = Oracle(path, max_model_len=variant.max_model_len)
        return made[variant.name]

    return find


@pytest.fixture(scope="module")
def oracle(variant: Variant, oracle_of: Callable[[Variant], Oracle]) -> Oracle:
    return oracle_of(variant)


@pytest.fixture(scope="module")
def checkpoint(oracle: Oracle) -> Path:
    return oracle.path


def difference(oracle: Oracle, logits: torch.Tensor, expected: torch.Tensor | None = None) -> float:
    """The largest difference in the log-probabilities of the five best tokens at every position, by default from
    `oracle.logits`."""
    theirs = (oracle.logits if expected is None else expected)[: len(logits)].log_softmax(-1)
    best = theirs.topk(5).indices
    ours = logits.float().log_softmax(-1)
    return float((ours.gather(1, best) - theirs.gather(1, best)).abs().max())


ONE_BY_ONE = (*[1] * 18, 116, *[1] * 16)
"""The prompt in single tokens, except for its middle, which is like its end and would take two thirds of the time."""


def give_its_logits(oracle: Oracle, chunk: int) -> None:
    """Check the logits of prompts that are computed in steps of the given number of tokens."""
    logits = Paged(oracle).run(oracle.tokens, ONE_BY_ONE if chunk == 1 else chunk)
    assert difference(oracle, logits) < MAX_DIFFERENCE
    assert torch.equal(logits.argmax(-1), oracle.logits.argmax(-1))


def share_steps(oracle: Oracle) -> Paged:
    """Run three sequences of different lengths together, and check their logits."""
    paged = Paged(oracle, seed=3)
    long, short, late = (paged.sequence(oracle.tokens[:length]) for length in (150, 9, 33))
    paged.step((long, 50), (short, 8))
    paged.step((long, 1), (late, 33), (short, 1))
    paged.step((long, 99))
    for sequence in (long, short, late):
        assert difference(oracle, torch.cat(sequence.logits)) < MAX_DIFFERENCE
    return paged


@pytest.mark.parametrize("chunk", [1, 1000])
def test_logits_match_transformers(oracle: Oracle, chunk: int) -> None:
    give_its_logits(oracle, chunk)


def test_sequences_of_one_batch_do_not_disturb_each_other(oracle: Oracle) -> None:
    """Prompts come in pieces and single tokens. By native kernels: heads of other sizes go to the reference, over which
    no step is recorded."""
    backend = share_steps(oracle).backend
    if available():
        assert isinstance(backend.inner if isinstance(backend, WholeImages) else backend, CpuBackend)


def test_the_last_layers_attend_for_the_rows_alone_that_are_wanted(oracle: Oracle) -> None:
    """In a step that wants no rows, the last layers only write KV."""
    paged = Paged(oracle, seed=4)
    long, short = paged.sequence(oracle.tokens), paged.sequence(oracle.tokens[:41])
    paged.step((long, 60), ends=[0])
    paged.step((short, 40), (long, 60), ends=[0, 2])
    paged.step((long, 30), (short, 1), ends=[3, 1])
    for sequence, places in ((long, [118, 119, 147, 148, 149]), (short, [40])):
        assert difference(oracle, torch.cat(sequence.logits), oracle.logits[places]) < MAX_DIFFERENCE


def ways_to_share(oracle: Oracle) -> list[bool]:
    """Values of expert_parallel: with every layer split, and, for models with experts, also with whole experts on each
    rank."""
    return [False] if oracle.spec.experts is None else [False, True]


def test_two_ranks_give_the_logits_of_one(oracle: Oracle) -> None:
    def run(rank: ThreadCommunicator) -> torch.Tensor:
        return Paged(oracle, model=oracle.load(rank)).run(oracle.tokens, 64)

    for way in ways_to_share(oracle):
        for logits in on_ranks(2, run, expert_parallel=way):
            assert difference(oracle, logits) < 2 * MAX_DIFFERENCE, way


NOT_STAGED = {"deepseek-v32", "gemma4-per-layer", "gemma4-unified-shared", "glm-moe-dsa", "glm-moe-dsa-each"}
"""Variants that check_stages refuses; tests/unit/test_stages.py has the reasons."""


def test_stages_give_the_same_bits(oracle: Oracle, variant: Variant) -> None:
    """Each layer is a separate stage, and passes its hidden states to the next one."""
    count = oracle.spec.num_layers

    def run(rank: ThreadCommunicator) -> torch.Tensor:
        paged = Paged(oracle, seed=4, model=oracle.load(rank))
        long, short = paged.sequence(oracle.tokens), paged.sequence(oracle.tokens[:41])
        paged.step((long, 60), ends=[0])
        paged.step((short, 40), (long, 60), ends=[0, 2])
        paged.step((long, 1), (short, 1))
        return torch.cat((*long.logits, *short.logits))

    if variant.name in NOT_STAGED:
        with pytest.raises(ConfigError, match=f"cannot be shared out over {count} stages"):
            on_stages(count, 1, oracle.load)
        return
    (whole,), shared = on_ranks(1, run), on_stages(count, 1, run)
    assert torch.equal(whole, shared[-1])


def test_the_weights_of_each_family_are_counted(oracle: Oracle, checkpoint: Path) -> None:
    groups = build(oracle.spec, "float32", "cpu", Sizes(8, 8)).weight_groups()
    assert oracle.spec.num_parameters() == sum(slot.num_elements for group in groups for slot in group.slots)
    planned = weights_bytes(Checkpoint(oracle.spec, read_headers(checkpoint)), 4)
    assert planned == 4 * oracle.spec.num_parameters()


def test_a_plan_has_the_memory_of_each_rank(oracle: Oracle, checkpoint: Path) -> None:
    shapes = Checkpoint(oracle.spec, read_headers(checkpoint)).shapes
    for communicator in (
        each for way in ways_to_share(oracle) for each in ThreadGroup(2, expert_parallel=way).communicators
    ):
        held = Counter(dict.fromkeys(shapes, 0))
        for group in build(oracle.spec, "float32", "cpu", Sizes(8, 8), None, communicator).weight_groups():
            for slot in group.slots:  # several slots may take parts of one tensor
                held[slot.name] += slot.num_elements
        planned = {name: prod(rank_shape(name, shapes[name], oracle.spec, communicator.shard)) for name in held}
        assert planned == held, communicator.shard


def test_int8_is_transformers_with_rounded_weights(oracle: Oracle, checkpoint: Path, float_products: None) -> None:
    model = oracle.load(quantization="int8")
    ours, theirs = Paged(oracle, model=model).run(oracle.tokens, 1000), rounded_logits(oracle, checkpoint)
    assert difference(oracle, ours, theirs) < 1e-3
    assert difference(oracle, ours) > 1e-2, "rounding is seen"


NEVER_ROUNDED = (".mlp.gate", ".mlp.shared_expert_gate", ".router", ".router.proj")
"""Weights that choose a token's experts; they keep their type."""


def rounded_logits(oracle: Oracle, checkpoint: Path) -> torch.Tensor:
    """Logits of transformers with every matrix rounded to int8; a tied head then has a separate matrix."""
    reference = transformers_model(checkpoint, oracle.spec.architecture)
    head = reference.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    round_by_head(reference, oracle.spec, rounded)
    for name, module in reference.named_modules():
        if any(part in name for part in ("visual", "vision", "multi_modal")):
            continue
        with torch.no_grad():
            if name.endswith(NEVER_ROUNDED):
                continue
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(rounded(module.weight))
            elif isinstance(module, transformers.pytorch_utils.Conv1D):
                module.weight.copy_(rounded(module.weight.t()).t())
            elif name.endswith(".experts"):
                first = module.gate_up_proj if module.has_gate else module.up_proj
                for matrix in (*first, *module.down_proj):
                    outputs_first = matrix.t() if module.is_transposed else matrix
                    outputs_first.copy_(rounded(outputs_first))
    with torch.inference_mode():
        logits: torch.Tensor = reference(oracle.tokens[None]).logits[0]
    return logits


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The values of a weight after it is quantized and dequantized."""
    out = torch.empty(weight.shape)
    PackedWeight(weight.detach().float().contiguous(), form="int8").rows(torch.arange(len(weight)), out)
    return out


CONTROLS = [(variant, name) for variant in VARIANTS for name in variant.controls]


@pytest.mark.parametrize(("variant", "control"), CONTROLS, ids=lambda value: getattr(value, "name", value))
def test_a_dropped_switch_is_seen(variant: Variant, control: str, oracle_of: Callable[[Variant], Oracle]) -> None:
    oracle = copy(oracle_of(variant))
    oracle.spec = variant.controls[control](oracle.spec)
    assert difference(oracle, Paged(oracle, model=oracle.load()).run(oracle.tokens, 1000)) > 0.05


BFLOAT16 = [
    "qwen2-window",
    "mixtral",
    "glm4-moe",
    "ministral3",
    "granite-tied",
    "phi3-long-partial-tied",
    "gpt2",
    "falcon-two-norms",
]


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.name in BFLOAT16], ids=lambda v: v.name)
def test_bfloat16_is_no_further_from_the_truth_than_transformers(
    variant: Variant, oracle_of: Callable[[Variant], Oracle]
) -> None:
    truth = oracle_of(variant)
    rounded = Oracle(truth.path, "bfloat16", variant.max_model_len)
    ours = Paged(rounded).run(rounded.tokens, 1000).float()
    assert (ours - truth.logits).abs().mean() < 1.2 * (rounded.logits - truth.logits).abs().mean()


def test_learned_positions_end_with_their_table(tmp_path: Path) -> None:
    spec = load_spec(next(one for one in VARIANTS if one.name == "gpt2-unscaled").make(tmp_path / "gpt2"))
    with pytest.raises(ConfigError, match=r"max_model_len must be at most the 256 positions .* got 257"):
        build(spec, "float32", "cpu", Sizes(257, 8))
