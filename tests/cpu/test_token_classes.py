"""Workers that classify tokens: numbers for each of them, against transformers, in float32 and whatever the chunks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cpu.test_pooling import PROMPTS, PoolingWorker, prompts_of
from tests.pooled import OSS, token_logits, write_pooled
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.families.privacy_filter import LABELS
from vllm_lite.errors import ModelError
from vllm_lite.kernels.cpu.library import available
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.step import Continue

WITHIN = 1e-4
HEADS = [
    ("BertForTokenClassification", {"num_labels": 9}),
    ("RobertaForTokenClassification", {"num_labels": 3}),
    ("XLMRobertaForTokenClassification", {"num_labels": 2}),
    ("CamembertForTokenClassification", {"num_labels": 2}),
    ("DistilBertForTokenClassification", {"num_labels": 5, "hidden_dim": 96}),
    ("ModernBertForTokenClassification", {"num_labels": 7, "classifier_bias": True}),
    ("OpenAIPrivacyFilterForTokenClassification", OSS),
    ("LlamaForTokenClassification", {"num_labels": 4, "num_key_value_heads": 2}),
    ("Qwen3ForTokenClassification", {"num_labels": 4}),
]


def rows_of(worker: PoolingWorker, prompts: Sequence[Sequence[int]], asked: Pooling) -> list[np.ndarray]:
    """Pool several prompts in one step: float32 [tokens, labels] of each."""
    worker.run(*(worker.new(handle, ids, asked) for handle, ids in enumerate(prompts)))
    return [worker.got.pop(handle).reshape(len(ids), -1) for handle, ids in enumerate(prompts)]


@pytest.mark.parametrize(("name", "settings"), HEADS, ids=lambda value: value if isinstance(value, str) else "")
def test_heads_match_transformers(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    path = write_pooled(tmp_path / "m", name, settings)
    worker = PoolingWorker(path, max_model_len=152)
    pooler = worker.ready.pooler
    count = settings.get("num_labels", len(LABELS))
    assert (pooler.tasks, len(pooler.labels), pooler.makes_pairs) == (("token_classify",), count, "")
    want = token_logits(path, PROMPTS)
    found = rows_of(worker, PROMPTS, Pooling("token_classify", use_activation=False))
    for own, expected in zip(found, want, strict=True):
        assert np.abs(own - expected.numpy()).max() < WITHIN * max(1.0, float(expected.abs().max()))
        assert (own.argmax(1) == expected.numpy().argmax(1)).all()


def test_probabilities_unless_logits_are_asked_for(tmp_path: Path) -> None:
    path = write_pooled(tmp_path / "m", "BertForTokenClassification", {"num_labels": 5})
    worker = PoolingWorker(path, max_model_len=152)
    want = [each.softmax(1).numpy() for each in token_logits(path, PROMPTS)]
    for own, expected in zip(rows_of(worker, PROMPTS, Pooling("token_classify")), want, strict=True):
        assert np.abs(own - expected).max() < WITHIN


def test_chunks_of_a_decoder_change_nothing(tmp_path: Path) -> None:
    path = write_pooled(tmp_path / "m", "Qwen3ForTokenClassification", {"num_labels": 4})
    worker, asked, (ids,) = PoolingWorker(path), Pooling("token_classify", use_activation=False), prompts_of(40)
    worker.run(worker.new(0, ids, asked, 17))
    worker.run(Continue(0, 23, []))
    assert np.abs(worker.got[0].reshape(40, 4) - token_logits(path, [ids])[0].numpy()).max() < WITHIN


@pytest.mark.parametrize("native", [True, False])
def test_the_band_and_the_sinks_of_the_privacy_filter(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens see exactly the given number of tokens to each side, in the kernels and in plain torch."""
    path = write_pooled(tmp_path / "m", "OpenAIPrivacyFilterForTokenClassification", OSS | {"num_hidden_layers": 1})
    if native and not available():
        pytest.skip("there are no native kernels")
    if not native:
        monkeypatch.setattr("vllm_lite.attention.encoder.available", lambda: False)
    worker = PoolingWorker(path, max_model_len=152)
    asked, (ids,) = Pooling("token_classify", use_activation=False), prompts_of(60)
    rows = rows_of(worker, [ids], asked)[0]
    assert np.abs(rows - token_logits(path, [ids])[0].numpy()).max() < WITHIN
    changed = [*ids]
    changed[30] = 5 if ids[30] != 5 else 6
    other = PoolingWorker(path, max_model_len=152)
    differs = np.abs(rows_of(other, [changed], asked)[0] - rows).max(1) > 0
    assert differs.nonzero()[0].tolist() == list(range(22, 39))


def test_labels_and_biases_of_a_checkpoint(tmp_path: Path) -> None:
    path = write_pooled(tmp_path / "m", "OpenAIPrivacyFilterForTokenClassification", OSS)
    config = json.loads((path / "config.json").read_text())
    config.pop("id2label", None)
    config.pop("label2id", None)
    (path / "config.json").write_text(json.dumps(config))
    pooling = load_spec(path).pooling
    assert pooling is not None
    assert (pooling.labels[:3], pooling.labels[-1], pooling.tag_biases) == (
        ("O", "B-account_number", "I-account_number"),
        "S-secret",
        (),
    )
    names = ("background_stay", "background_to_start", "inside_to_continue", "inside_to_end")
    biases = {f"transition_bias_{name}": place / 4 for place, name in enumerate(names)}
    biases |= {"transition_bias_end_to_background": -1.0, "transition_bias_end_to_start": -2.0}
    file = path / "viterbi_calibration.json"
    file.write_text(json.dumps({"operating_points": {"default": {"biases": biases}}}))
    pooling = load_spec(path).pooling
    assert pooling is not None
    assert pooling.tag_biases == (0.0, 0.25, 0.5, 0.75, -1.0, -2.0)
    del biases["transition_bias_end_to_start"]
    file.write_text(json.dumps({"operating_points": {"default": {"biases": biases}}}))
    with pytest.raises(ModelError, match="transition_bias_end_to_start"):
        load_spec(path)
    file.write_text(json.dumps({"operating_points": {}}))
    with pytest.raises(ModelError, match="operating_points has no 'default'"):
        load_spec(path)


def test_ranks_share_the_privacy_filter(tmp_path: Path) -> None:
    """With heads, sinks and experts, through whole engines with two ranks, as threads."""
    from vllm_lite import LLM
    from vllm_lite.protocol.pooling import PoolingParams

    path = write_pooled(tmp_path / "m", "OpenAIPrivacyFilterForTokenClassification", OSS)
    plain: dict[str, Any] = {"single_process": True, "dtype": "float32", "cpu_threads": 1, "max_model_len": 152}
    with LLM(str(path), tensor_parallel_size=2, **plain) as llm:
        found = llm.encode([list(ids) for ids in PROMPTS], PoolingParams(use_activation=False), use_tqdm=False)
    for each, want in zip(found, token_logits(path, PROMPTS), strict=True):
        assert (torch.tensor(each.outputs.data) - want).abs().max() < WITHIN * max(1.0, float(want.abs().max()))
