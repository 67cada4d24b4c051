"""Entities in texts equal those of transformers' pipeline, also through engines; long texts have the same entities as
short ones."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entities import BIOES, LABELS, pipeline_of, plain, texts, write_classifier
from tests.pooled import OSS
from vllm_lite import LLM
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.token_classes import AGGREGATIONS, Entity, EntityFinder, redacted
from vllm_lite.errors import RequestError
from vllm_lite.protocol.pooling import PoolerInfo, PoolingParams

PLAIN: dict[str, Any] = {"single_process": True, "dtype": "float32", "cpu_threads": 1, "device": "cpu"}
OF_TRANSFORMERS = [name for name in AGGREGATIONS if name != "viterbi"]


def as_plain(entities: list[Entity]) -> list[tuple[str, int, int, float]]:
    return [(each.label, each.start, each.end, each.score) for each in entities]


def same(found: list[Entity], wanted: list[tuple[str, int, int, float]], text: str) -> None:
    assert [each[:3] for each in as_plain(found)] == [each[:3] for each in wanted], text
    assert [each.score for each in found] == pytest.approx([each[3] for each in wanted], abs=1e-4)
    assert all(each.text == text[each.start : each.end] for each in found)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("name", ["BertForTokenClassification", "RobertaForTokenClassification"])
def test_texts_have_the_pipelines_entities(tmp_path: Path, name: str) -> None:
    """Given the same logits: compares how tokens become entities, for tokenizers of word pieces and of bytes."""
    path = write_classifier(tmp_path / "m", name, max_position_embeddings=600)
    pipeline, tokenizer = pipeline_of(path), Tokenizer.load(path)
    pooler = PoolerInfo(("token_classify",), labels=LABELS)
    finders = {way: EntityFinder(pooler, tokenizer, way) for way in OF_TRANSFORMERS}
    several = [text for text in texts(150) if text or name.startswith("Bert")]
    num_entities = dict.fromkeys(OF_TRANSFORMERS, 0)
    for text, placed in zip(several, tokenizer.placed_batch(several), strict=True):
        (given,) = pipeline.preprocess(text, is_split_into_words=False)
        assert given["input_ids"][0].tolist() == placed.token_ids
        with torch.inference_mode():
            outputs = [pipeline._forward(given)]
        numbers = array("f", outputs[0]["logits"][0].flatten().tolist())
        for way, finder in finders.items():
            strategy = pipeline._sanitize_parameters(aggregation_strategy=way)[2]
            want = plain(pipeline.postprocess(outputs, **strategy))
            same(finder.entities(text, placed, numbers), want, text)
            num_entities[way] += len(want)
    assert min(num_entities.values()) > 600
    assert len(set(num_entities.values())) > 2, "the ways must differ"


def test_labels_that_are_ignored(tmp_path: Path) -> None:
    path = write_classifier(tmp_path / "m", "BertForTokenClassification", max_position_embeddings=600)
    pipeline = pipeline_of(path)
    with LLM(str(path), **PLAIN) as llm:
        several = texts(40)
        for ignored in (["O"], [], ["O", "PER"], ["MISC", "LOC"]):
            found = llm.token_classify(several, use_tqdm=False, aggregation="simple", ignore_labels=ignored)
            for text, own in zip(several, found, strict=True):
                want = plain(pipeline(text, aggregation_strategy="simple", ignore_labels=ignored))
                same(own.outputs.entities, want, text)


def test_spans_of_the_privacy_filter(tmp_path: Path) -> None:
    """Through an engine. The default is the likeliest path through its tags; entities have no blanks at their ends, and
    a redacted text is the others' text around them."""
    name = "OpenAIPrivacyFilterForTokenClassification"
    path = write_classifier(tmp_path / "m", name, BIOES, **OSS | {"num_labels": len(BIOES)})
    several = [text for text in texts(60) if text]
    pipeline = pipeline_of(path)
    with LLM(str(path), max_model_len=512, **PLAIN) as llm:
        simple = llm.token_classify(several, use_tqdm=False, aggregation="simple")
        found = llm.token_classify(several, use_tqdm=False)
        explicit = llm.token_classify(several, use_tqdm=False, aggregation="viterbi")
        with pytest.raises(RequestError, match="the text is empty"):
            llm.token_classify("")
        with pytest.raises(RequestError, match=r"aggregation_strategy must be one of none, simple, .* got 'last'"):
            llm.token_classify("a", aggregation="last")
        with pytest.raises(RequestError, match="takes a text or a list of texts"):
            llm.token_classify([[1, 2]])  # type: ignore[list-item]
        with pytest.raises(RequestError, match="truncate_prompt_tokens does not go with entities"):
            llm.token_classify("a", PoolingParams(truncate_prompt_tokens=3))
    for text, own in zip(several, simple, strict=True):
        same(own.outputs.entities, plain(pipeline(text, aggregation_strategy="simple")), text)
    for text, own, other in zip(several, found, explicit, strict=True):
        same(own.outputs.entities, as_plain(other.outputs.entities), text)
    assert sum(len(each.outputs.entities) for each in found) > 100
    for text, own in zip(several, found, strict=True):
        for entity in own.outputs.entities:
            assert entity.label in ("person", "place")
            assert entity.text == text[entity.start : entity.end] == entity.text.strip()
        if own.outputs.entities:
            first = own.outputs.entities[0]
            assert own.outputs.redacted.startswith(text[: first.start] + f"<{first.label.upper()}>")


def test_windows_of_a_long_text_agree_with_the_whole_text(tmp_path: Path) -> None:
    """Windows must share as many tokens as a label depends on, to both sides."""
    name = "OpenAIPrivacyFilterForTokenClassification"
    path = write_classifier(tmp_path / "m", name, BIOES, **OSS | {"num_labels": len(BIOES)})
    text = " ".join(texts(60)[7:])[:1800]
    with LLM(str(path), max_model_len=4096, **PLAIN) as llm:
        (want,) = llm.token_classify(text, use_tqdm=False)
        (rows,) = llm.encode(text, PoolingParams(use_activation=False), use_tqdm=False)
    reach = OSS["num_hidden_layers"] * OSS["sliding_window"]
    with LLM(str(path), max_model_len=150, **PLAIN) as llm:
        (found,) = llm.token_classify(text, use_tqdm=False, stride=2 * reach)
        (narrow,) = llm.token_classify(text, use_tqdm=False, stride=0)
        (own,) = llm.encode(text, PoolingParams(use_activation=False), use_tqdm=False)
        with pytest.raises(RequestError, match="stride must be between 0 and 75, got 76"):
            llm.token_classify(text, stride=76)
        with pytest.raises(RequestError, match=r"is 131072 tokens, but the text has [^;]*; split the text$"):
            llm.token_classify("ab " * 200_000)
        with pytest.raises(RequestError, match="maximum context length is 150 tokens"):
            llm.encode([5] * 200)
    assert found.prompt_token_ids == want.prompt_token_ids
    assert len(found.prompt_token_ids) > 4 * 150
    same(found.outputs.entities, as_plain(want.outputs.entities), text)
    assert len(want.outputs.entities) > 30
    assert as_plain(narrow.outputs.entities) != as_plain(want.outputs.entities), "without context they must differ"
    difference = torch.tensor(own.outputs.data) - torch.tensor(rows.outputs.data)
    assert difference.shape == (len(found.prompt_token_ids), len(BIOES))
    assert difference.abs().max() > 1e-4, "a quarter of the window is less than the label depends on"


def test_windows_have_the_special_tokens_of_a_text(tmp_path: Path) -> None:
    """The model gets each window as a separate text, whose rows equal transformers' for that text."""
    from tests.pooled import token_logits

    path = write_classifier(tmp_path / "m", "BertForTokenClassification")
    text = "Maria lives in New York, " * 12
    with LLM(str(path), max_model_len=40, **PLAIN) as llm:
        (found,) = llm.encode(text, PoolingParams(use_activation=False), use_tqdm=False)
    ids = found.prompt_token_ids
    own, room, overlap = ids[1:-1], 38, 10
    rows = torch.tensor(found.outputs.data)
    for start in range(0, len(own) - overlap, room - overlap):
        window = [ids[0], *own[start : start + room], ids[-1]]
        (want,) = token_logits(path, [window])
        first = overlap // 2 if start else 0
        last = len(window) - 2 if start + room >= len(own) else room - overlap // 2
        assert (rows[1 + start + first : 1 + start + last] - want[1 + first : 1 + last]).abs().max() < 1e-4


def test_entities_that_share_a_character_are_redacted_once() -> None:
    entities = [Entity("a", 1.0, 0, 2, "xy"), Entity("b", 1.0, 1, 2, "y"), Entity("b", 1.0, 1, 4, "y z")]
    assert redacted("xy z!", entities) == "<A><B>!"
    assert redacted("xy", []) == "xy"
