"""Workers that pool: hidden states, heads and norms against transformers, in float32 and whatever the chunks."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pooled import add_modules, logits, vectors, write_pooled
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.protocol.control import Start
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.pooling import Pooling
from vllm_lite.protocol.step import (
    NOT_FINITE,
    Continue,
    Finish,
    ModelOutput,
    NewRequest,
    Preempt,
    Resume,
    SchedulerOutput,
)
from vllm_lite.worker.progress import Progress
from vllm_lite.worker.worker import Worker

SAMPLING = SamplingParams(temperature=0).for_worker(0, 9, (), None, unscored=False)
WITHIN = 1e-5


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 384) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(1, 7, 64, 65, 33, 20, 150)


class PoolingWorker:
    """A worker that executes steps; `got` has the pooled results by handle."""

    def __init__(self, path: Path, **settings: Any) -> None:
        plain = {
            "model": str(path),
            "dtype": "float32",
            "device": "cpu",
            "cpu_threads": 1,
            "num_gpu_blocks_override": 80,
        }
        resolved = resolve(EngineConfig.check(plain | settings))
        self.worker = Worker(resolved, 0, Progress())
        self.ready = self.worker.load()
        self.worker.start(Start(1, self.ready.num_blocks, 0))
        self.num_groups = len(self.ready.groups)
        self.step = 0
        self.got: dict[int, np.ndarray] = {}

    def run(self, *entries: Any) -> ModelOutput:
        self.step += 1
        output = self.worker.execute(SchedulerOutput(1, self.step, [], list(entries)))
        for handle, data in output.pooled or ():
            assert handle not in self.got
            self.got[handle] = np.frombuffer(data, "<f4")
        self.worker.runner.batch.check_integrity()
        return output

    def new(self, handle: int, ids: Sequence[int], asked: Pooling, count: int | None = None) -> NewRequest:
        blocks = [[1 + handle * 10 + place for place in range(10)] for _ in range(self.num_groups)]
        tokens = np.array(ids, "<u4").tobytes()
        count = len(ids) if count is None else count
        return NewRequest(handle, tokens, len(ids), SAMPLING, 0, 0, count, blocks, asked)

    def all(self, prompts: Sequence[Sequence[int]], asked: Pooling) -> torch.Tensor:
        """Pool several prompts in one step."""
        self.run(*(self.new(handle, ids, asked) for handle, ids in enumerate(prompts)))
        rows = [self.got.pop(handle) for handle in range(len(prompts))]
        self.run(*(Finish(handle) for handle in range(len(prompts))))
        return torch.from_numpy(np.stack(rows))


EMBEDDERS = [
    ("Qwen3Model", "last", {}),
    ("Qwen3ForCausalLM", "mean", {}),
    ("LlamaModel", "last", {"num_key_value_heads": 2}),
    ("MistralModel", "last", {"num_key_value_heads": 2, "sliding_window": None}),
    ("BertModel", "cls", {}),
    ("BertForMaskedLM", "mean", {}),
    ("RobertaModel", "mean", {}),
    ("XLMRobertaModel", "cls", {}),
    ("DistilBertModel", "mean", {"hidden_dim": 96}),
    ("DistilBertForMaskedLM", "cls", {"hidden_dim": 96}),
    ("ModernBertModel", "cls", {}),
    ("ModernBertModel", "mean", {}),
    ("NomicBertModel", "mean", {}),
    ("GteModel", "cls", {}),
    ("GteModel", "last", {}),
]


@pytest.mark.parametrize(
    ("name", "mode", "settings"), EMBEDDERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_vectors_match_transformers(tmp_path: Path, name: str, mode: str, settings: dict[str, Any]) -> None:
    path = add_modules(write_pooled(tmp_path / "m", name, settings), mode)
    worker = PoolingWorker(path, max_num_batched_tokens=512)
    assert (worker.ready.pooler.size, worker.ready.pooler.normalizes) == (64, True)
    want = vectors(path, PROMPTS, mode)
    assert (worker.all(PROMPTS, Pooling("embed")) - want).abs().max() < WITHIN
    raw = vectors(path, PROMPTS[:3], mode, finish=lambda states: states[:, :16])
    found = worker.all(PROMPTS[:3], Pooling("embed", dimensions=16, use_activation=False))
    assert (found - raw).abs().max() < 5 * WITHIN * raw.abs().max()


@pytest.mark.parametrize("mode", ["last", "mean", "cls"])
def test_chunks_preemption_and_neighbours_change_nothing(tmp_path: Path, mode: str) -> None:
    """Beside a sequence that generates; one prompt is preempted in the middle, and computed again as a whole."""
    path = add_modules(write_pooled(tmp_path / "m", "Qwen3ForCausalLM"), mode, dense=24, normalize=False)
    worker = PoolingWorker(path)
    asked, rows, alone = Pooling("embed"), Pooling("token_embed", use_activation=False), prompts_of(40, 40, 40, 21)
    stream = SamplingParams(temperature=0).for_worker(0, 21, (), None, unscored=False)
    first = worker.run(
        worker.new(0, alone[0], asked, 17),
        worker.new(1, alone[1], asked, 39),
        NewRequest(5, np.array(alone[3], "<u4").tobytes(), 21, stream, 0, 0, 21, [[55, 56, 57]]),
        worker.new(2, alone[2], rows, 9),
    )
    assert (first.counts, first.pooled, len(first.tokens)) == (None, None, 4)
    second = worker.run(Preempt(0), Continue(1, 1, []), Continue(5, 1, []), Continue(2, 31, []))
    assert second.counts == [0, 1, 0]
    worker.run(Resume(0, 0, 0, 30, [list(range(1, 11))]), Continue(5, 1, []))
    third = worker.run(Continue(5, 1, []), Continue(0, 10, []))
    assert third.counts == [1, 0]
    from safetensors.torch import load_file

    dense = load_file(path / "2_Dense" / "model.safetensors")

    def finish(states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(states @ dense["linear.weight"].T + dense["linear.bias"])

    want = vectors(path, alone[:2], mode, finish=finish)
    got = torch.from_numpy(np.stack([worker.got[0], worker.got[1]]))
    assert (torch.nn.functional.normalize(want) - got).abs().max() < WITHIN
    last = vectors(path, [alone[2][: place + 1] for place in range(40)], "last", finish=finish)
    assert np.abs(worker.got[2].reshape(40, 24) - last.numpy()).max() < 5 * WITHIN


CLASSIFIERS = [
    ("BertForSequenceClassification", {"num_labels": 3}),
    ("RobertaForSequenceClassification", {"num_labels": 1}),
    ("XLMRobertaForSequenceClassification", {"num_labels": 2, "problem_type": "multi_label_classification"}),
    ("DistilBertForSequenceClassification", {"num_labels": 2, "hidden_dim": 96, "sinusoidal_pos_embds": False}),
    ("ModernBertForSequenceClassification", {"num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True}),
    ("NomicBertForSequenceClassification", {"num_labels": 2}),
    ("GteForSequenceClassification", {"num_labels": 1}),
    ("Qwen3ForSequenceClassification", {"num_labels": 1, "pad_token_id": 0}),
    ("LlamaForSequenceClassification", {"num_labels": 4, "pad_token_id": 0, "problem_type": "regression"}),
]


@pytest.mark.parametrize(("name", "settings"), CLASSIFIERS, ids=lambda value: value if isinstance(value, str) else "")
def test_heads_match_transformers(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    path = write_pooled(tmp_path / "m", name, settings)
    worker = PoolingWorker(path, max_num_batched_tokens=512)
    count = settings["num_labels"]
    pooler = worker.ready.pooler
    assert (pooler.tasks, len(pooler.labels)) == (("classify", "score") if count == 1 else ("classify",), count)
    want = logits(path, PROMPTS)
    raw = worker.all(PROMPTS, Pooling("classify", use_activation=False))
    assert (raw - want).abs().max() < WITHIN * max(1, float(want.abs().max()))
    problem = settings.get("problem_type")
    if problem != "regression":
        want = want.sigmoid() if problem or count == 1 else want.softmax(1)
    assert (worker.all(PROMPTS, Pooling("classify")) - want).abs().max() < WITHIN * max(1, float(want.abs().max()))


def test_the_second_text_of_a_pair_has_its_type(tmp_path: Path) -> None:
    path = write_pooled(tmp_path / "m", "BertForSequenceClassification", {"num_labels": 1})
    worker = PoolingWorker(path)
    types = [[0] * 3 + [1] * (len(ids) - 3) for ids in PROMPTS[1:]]
    want = logits(path, PROMPTS[1:], types).sigmoid()
    found = worker.all(PROMPTS[1:], Pooling("score", second_at=3))
    assert (found - want).abs().max() < WITHIN
    assert (found - logits(path, PROMPTS[1:]).sigmoid()).abs().max() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_that_answers_by_a_token(tmp_path: Path, tied: bool) -> None:
    """Qwen3-Reranker as it is published: the share of "yes" among the logits of two tokens."""
    from transformers import AutoModelForCausalLM

    path = write_pooled(tmp_path / "m", "Qwen3ForCausalLM", {"tie_word_embeddings": tied})
    vocabulary = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = list(vocabulary)[100], list(vocabulary)[200]
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": [no, yes]}
    worker = PoolingWorker(path, hf_overrides=overrides | {"is_original_qwen3_reranker": True})
    assert (worker.ready.pooler.tasks, worker.ready.pooler.makes_pairs) == (("classify", "score"), "template")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([vocabulary[no], vocabulary[yes]])
    with torch.inference_mode():
        want = [model(torch.tensor([prompt])).logits[0, -1, ids].softmax(0)[1] for prompt in PROMPTS]
    assert (worker.all(PROMPTS, Pooling("score"))[:, 0] - torch.stack(want)).abs().max() < WITHIN


def test_a_text_with_nan_fails_alone(tmp_path: Path) -> None:
    worker = PoolingWorker(add_modules(write_pooled(tmp_path / "m", "BertModel"), "mean"))
    worker.worker.model.embedding.weight[9] = float("nan")  # type: ignore[attr-defined]
    prompts = [[5, 6, 7], [8, 9, 10], [5, 6]]
    output = worker.run(*(worker.new(handle, ids, Pooling("embed")) for handle, ids in enumerate(prompts)))
    assert (list(worker.got), output.failed, output.counts) == ([0, 2], [(1, NOT_FINITE)], [0, 0, 0])


def test_ranks_share_an_encoder_and_a_classifier(tmp_path: Path) -> None:
    """Through whole engines with two ranks, as threads."""
    from vllm_lite import LLM

    for name, settings in (("BertModel", {}), ("Qwen3ForSequenceClassification", {"pad_token_id": 0})):
        path = write_pooled(tmp_path / name, name, settings)
        plain: dict[str, Any] = {"single_process": True, "dtype": "float32", "cpu_threads": 1}
        with LLM(str(path), tensor_parallel_size=2, **plain) as llm:
            found = llm.encode([list(ids) for ids in PROMPTS], use_tqdm=False)
        if name == "BertModel":
            got = torch.tensor([each.outputs.embedding for each in found])
            assert (got - vectors(path, PROMPTS, "cls")).abs().max() < WITHIN
        else:
            got = torch.tensor([each.outputs.probs for each in found])
            assert (got - logits(path, PROMPTS).softmax(1)).abs().max() < WITHIN


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"modules": [{"path": "../x", "type": "a.Dense"}]}, "not within the model's"),
        ({"modules": [{"path": "x", "type": "a.CNN"}]}, r"module 'a.CNN' is not supported"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling modes max are not supported"),
        (
            {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}},
            "cls, mean are not supported",
        ),
        ({"config": {"is_causal": False}}, "is_causal false is not supported"),
    ],
)
def test_other_poolers_are_refused_by_name(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = add_modules(write_pooled(tmp_path / "m", "Qwen3ForCausalLM"), "mean")
    files = {"modules": "modules.json", "pooling": "1_Pooling/config.json", "config": "config.json"}
    for key, content in change.items():
        file = path / files[key]
        old = json.loads(file.read_text())
        file.write_text(json.dumps(old | content if key == "config" else content))
    with pytest.raises(ModelError, match=problem):
        load_spec(path)


def test_settings_of_the_pooler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model for generation makes vectors if configured; its files or the user determine the pooling."""
    path = write_pooled(tmp_path / "plain", "Qwen3ForCausalLM")
    assert load_spec(path).pooling is None
    for settings in ({"runner": "pooling"}, {"convert": "embed"}):
        config = EngineConfig.check({"model": str(path), **settings})
        pooling = load_spec(path, options=config.pooling).pooling
        assert pooling is not None
        assert (pooling.kind, pooling.normalize, pooling.generates) == ("last", True, True)
    asked = {"convert": "embed", "pooler_config": {"pooling_type": "MEAN", "normalize": False}}
    pooling = load_spec(path, options=EngineConfig.check(asked).pooling).pooling
    assert pooling is not None
    assert (pooling.kind, pooling.normalize) == ("mean", False)
    with pytest.raises(ConfigError, match="pooling_type must be one of LAST, MEAN, CLS, got 'MAX'"):
        EngineConfig.check({"pooler_config": {"pooling_type": "MAX"}})
    resolve(EngineConfig.check({"model": str(path), "device": "cpu", "pooler_config": {"pooling_type": "MEAN"}}))
    assert "pooler_config does nothing: this model makes no vectors" in caplog.text
    asked["pooler_config"] = {"task": "token_embed"}
    pooling = load_spec(path, options=EngineConfig.check(asked).pooling).pooling
    assert pooling is not None
    assert pooling.tasks == ("token_embed",)
    asked["pooler_config"] = {"task": "classify"}
    with pytest.raises(ModelError, match="task is classify, and this model can be asked to embed or token_embed"):
        load_spec(path, options=EngineConfig.check(asked).pooling)
    bert = add_modules(write_pooled(tmp_path / "bert", "BertModel"), "mean", longest=100)
    config = resolve(EngineConfig.check({"model": str(bert), "device": "cpu"}))
    assert (config.max_model_len, config.enable_chunked_prefill, config.enable_prefix_caching) == (100, False, False)
    assert config.max_num_batched_tokens >= 100


def test_an_encoder_takes_settings_of_chats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `serve --models` gives `defaults` to every model; docs/many-models.md has such a file."""
    folder = write_pooled(tmp_path / "bert", "BertModel")
    given = {"kv_cache_dir": str(tmp_path / "kv"), "max_itl_ms": 50, "swap_space": 1.0}
    with caplog.at_level("INFO"):
        config = resolve(EngineConfig.check({"model": str(folder), "device": "cpu", **given}))
    assert (config.kv_cache_dir, config.max_itl_ms, config.swap_space) == (None, None, 0.0)
    assert "kv_cache_dir and max_itl_ms: nothing to do for an encoder" in caplog.text
