"""Texts per second of LLM.token_classify, beside transformers' pipeline, on random models and texts of 8 to 256 tokens.

    python benchmarks/token_classes.py --shape 30m --texts 200
    python benchmarks/token_classes.py --shape privacy-filter --texts 60

Both engines get the same words and return entities (strategy simple); each is its own process, and they are measured
alternately. The pipeline runs in both types and with several batch sizes, of which the best counts. Besides its speed,
each run has the share of the pipeline's float32 entities that it finds, by label and characters. The shape
privacy-filter is that of OpenAI's model with fewer experts, but as many experts per token.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from embeddings import NUM_WORDS, SHAPES, SPECIAL, asked, best_in_turn, make_texts

Found = list[set[tuple[str, int, int]]]
"""Label, start and end of each text's entities."""

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
BIOES = ("O", *(f"{tag}-{kind}" for kind in ("person", "place", "date") for tag in "BIES"))
FILTER: dict[str, Any] = {"num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 8, "pad_token_id": 0}
KINDS = (*SHAPES, "privacy-filter")


def make(shape: str, folder: Path) -> None:
    """Write a random model whose words are tokens."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    words = [*SPECIAL, *(f"w{number}" for number in range(NUM_WORDS))]
    labels = LABELS if shape in SHAPES else BIOES
    named: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: place for place, label in enumerate(labels)},
    }
    if shape in SHAPES:
        config: Any = transformers.BertConfig(vocab_size=len(words), **SHAPES[shape], **named)
        model: Any = transformers.BertForTokenClassification(config)
    else:
        config = transformers.OpenAIPrivacyFilterConfig(vocab_size=len(words), **FILTER, **named)
        model = transformers.OpenAIPrivacyFilterForTokenClassification(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if shape in SHAPES:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, model_input_names=["input_ids", "attention_mask"], **names
    ).save_pretrained(folder)


def ours(folder: Path, texts: list[str], settings: dict[str, Any]) -> tuple[float, Found]:
    """Texts per second of LLM.token_classify, and the entities."""
    from vllm_lite import LLM

    with LLM(folder, max_model_len=512, **settings) as llm:
        llm.token_classify(texts[:64], use_tqdm=False, aggregation="simple")
        began_s = time.perf_counter()
        outputs = llm.token_classify(texts, use_tqdm=False, aggregation="simple")
        speed = len(texts) / (time.perf_counter() - began_s)
    return speed, [{(own.label, own.start, own.end) for own in each.outputs.entities} for each in outputs]


def theirs(folder: Path, texts: list[str], settings: dict[str, Any]) -> tuple[float, Found]:
    """The same of transformers' pipeline."""
    from transformers import pipeline

    asked: Any = {"model": str(folder), "dtype": settings["dtype"], "device": "cpu"}
    classify: Any = pipeline("token-classification", **asked)
    size = settings["batch_size"]
    classify(texts[:8], aggregation_strategy="simple", batch_size=size)
    began_s = time.perf_counter()
    outputs = classify(texts, aggregation_strategy="simple", batch_size=size)
    speed = len(texts) / (time.perf_counter() - began_s)
    return speed, [{(own["entity_group"], own["start"], own["end"]) for own in each} for each in outputs]


RUNS: dict[str, dict[str, Any]] = {
    "ours bfloat16": {"dtype": "bfloat16"},
    "ours int8": {"dtype": "bfloat16", "quantization": "int8"},
    "ours float32": {"dtype": "float32"},
    **{
        f"pipeline {dtype} {size}": {"dtype": dtype, "batch_size": size}
        for dtype in ("float32", "bfloat16")
        for size in (1, 8)
    },
}
ORACLE = "pipeline float32 1"


def measure(name: str, folder: Path, count: int) -> None:
    """Write the entities of one run into the folder, print its speed."""
    run = ours if name.startswith("ours") else theirs
    speed, found = run(folder, make_texts(count), RUNS[name])
    (folder / f"{name}.json").write_text(json.dumps([sorted(each) for each in found]))
    print("texts/s", speed)


def share(folder: Path, name: str) -> float:
    """The share of the entities of `ORACLE` that a run has found."""
    own, wanted = (json.loads((folder / f"{each}.json").read_text()) for each in (name, ORACLE))
    both = sum(len({*map(tuple, one)} & {*map(tuple, other)}) for one, other in zip(own, wanted, strict=True))
    return both / max(1, sum(map(len, wanted)))


def main() -> None:
    options = asked(__doc__, KINDS, 200)
    if options.run:
        measure(options.run, options.folder, options.texts)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(options.shape, Path(folder))
        best = best_in_turn(__file__, RUNS, folder, options)
        shares = {name: share(Path(folder), name) for name in RUNS}
    usual = best[ORACLE]
    peer = max(speed for name, speed in best.items() if not name.startswith("ours"))
    for name, speed in best.items():
        ratios = f"{speed / usual:.2f} x the pipeline as it is, {speed / peer:.2f} x its best"
        print(f"{name:24} {speed:7.1f} texts/s, {ratios}, {shares[name]:.4f} of its entities")


if __name__ == "__main__":
    main()
