"""A checkpoint with all experts in one tensor gives the same model as one with a tensor for each expert."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.mixtures import VARIANTS
from tests.paged import Oracle, Paged
from tests.thread_group import on_ranks
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.errors import ModelError
from vllm_lite.models.registry import Sizes, build
from vllm_lite.models.weights import load_weights

NAMES = ["mixtral", "qwen2-moe", "glm4-moe", "granite-moe-shared"]


@pytest.fixture(params=NAMES)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint as transformers writes it by default, and one with the tensors that it has in memory."""
    import transformers

    made = next(variant for variant in VARIANTS if variant.name == request.param).make(tmp_path / "made")
    model = transformers.AutoModelForCausalLM.from_pretrained(made, dtype="float32")
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    return made, tmp_path / "new"


def test_both_forms_are_one_model(both: tuple[Path, Path]) -> None:
    made, new = (Oracle(path) for path in both)
    assert new.spec.experts is not None
    assert new.spec.experts.stored == "fused"
    assert torch.equal(Paged(new).run(new.tokens, 1000), Paged(made).run(made.tokens, 1000))


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["split", "expert parallel"])
def test_ranks_share_a_fused_tensor(both: tuple[Path, Path], *, expert_parallel: bool) -> None:
    new = Oracle(both[1])
    alone, options = Paged(new).run(new.tokens, 1000), {"expert_parallel": expert_parallel}
    for logits in on_ranks(2, lambda rank: Paged(new, model=new.load(rank)).run(new.tokens, 1000), **options):
        assert (logits - alone).abs().max() < 1e-3


def test_dummy_weights_need_no_files(both: tuple[Path, Path], tmp_path: Path) -> None:
    spec = load_spec(both[1])
    model = build(spec, "float32", "cpu", Sizes(8, 8))
    load_weights(model, tmp_path / "nowhere", load_format="dummy")


def test_a_stack_of_another_number_is_refused(tmp_path: Path) -> None:
    path = next(variant for variant in VARIANTS if variant.name == "granite-moe").make(tmp_path / "made")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: tensors[name][:-1].clone()}, path / "model.safetensors")
    model = build(load_spec(path), "float32", "cpu", Sizes(8, 8))
    with pytest.raises(ModelError, match=r"1 of another shape: .*gate_up_proj \(4, 44, 96\), not \(5, 44, 96\)"):
        load_weights(model, path)


def test_matrices_of_all_experts_may_be_stored_transposed(tmp_path: Path) -> None:
    """Qwen3-VL's are published like this; transformers reads both forms, and writes the one that it has in memory."""
    made = next(variant for variant in VARIANTS if variant.name == "qwen3-vl-moe").make(tmp_path / "made")
    usual = Oracle(made)
    tensors = load_file(made / "model.safetensors")
    turned = {name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in tensors.items()}
    save_file(turned, made / "model.safetensors", {"format": "pt"})
    published = Oracle(made)
    assert usual.spec.experts is not None
    assert published.spec.experts is not None
    assert (usual.spec.experts.transposed, published.spec.experts.transposed) == (False, True)
    assert torch.equal(published.logits, usual.logits)
    assert torch.equal(Paged(published).run(usual.tokens, 1000), Paged(usual).run(usual.tokens, 1000))
    for logits in on_ranks(2, lambda rank: Paged(published, model=published.load(rank)).run(usual.tokens, 1000)):
        assert (logits - usual.logits).abs().max() < 1e-3
