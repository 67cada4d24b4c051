"""Models that classify tokens, and texts for them: of several alphabets, long, empty and meant to break something."""

import json
import random
from pathlib import Path
from typing import Any

from tests.pooled import write_pooled

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "E-ORG")
BIOES = ("O", *(f"{tag}-{kind}" for kind in ("person", "place") for tag in "BIES"))
_WORDS = (
    *("Maria", "Ángela", "of", "the", "New", "York", "O'Neill", "U.S.", "don't", "straße", "ÉCOLE", "x", "naïve"),
    *(
        "e\u0301te\u0301",
        "中国",
        "東京都",
        "한국어",
        "привет",
        "שלום",
        "مرحبا",
        "हिन्दी",
        "ไทย",
        "😀",
        "👩🏽‍💻",
        "🇩🇪",
        "x\u200dy",
        "\ufeff",
        "1,234.5",
        "a@b.example",
    ),
    *(
        "https://x.example/?a=1&b=2",
        "<b>",
        "[UNK]",
        "<unk>",
        "[CLS]",
        "##ing",
        "\\n",
        "C++",
        "...",
        "\u202e",
        "ﬁne",
        "Ⅳ",
        "\x00",
        "\x07",
    ),
)
_BLANKS = (" ", "  ", "\n", "\t", "\u00a0", "\u3000", "", "-")


def texts(count: int, *, seed: int = 0, longest: int = 24) -> list[str]:
    """`count` random texts of up to `longest` words; the same for the same seed."""
    rng = random.Random(seed)
    found = ["", " ", "\n\n", "a", "😀", "a" * 150, "Maria lives in New York."]
    while len(found) < count:
        words = (rng.choice(_WORDS) + rng.choice(_BLANKS) for _ in range(rng.randint(1, longest)))
        found.append("".join(words))
    return found


def word_pieces(path: Path) -> Path:
    """Give the checkpoint in `path` a tokenizer like BERT's: lower case without accents, pieces behind ##."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = [chr(place) for place in range(33, 127)] + list("áéüßпривет中国東京한שלום")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    names += ["maria", "new", "york", "##ria", "##ing", "live", "##s", "the", "of"]
    vocab = {name: place for place, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]", "pad_token": "[PAD]"}))
    return path


def write_classifier(path: Path, name: str, labels: tuple[str, ...] = LABELS, **settings: Any) -> Path:
    """Write a checkpoint that classifies tokens, of the class `name` of transformers; BERT's has pieces of words."""
    write_pooled(path, name, {"num_labels": len(labels), **settings})
    config = json.loads((path / "config.json").read_text())
    config["id2label"] = {str(place): label for place, label in enumerate(labels)}
    config["label2id"] = {label: place for place, label in enumerate(labels)}
    (path / "config.json").write_text(json.dumps(config))
    return word_pieces(path) if name.startswith("Bert") else path


def pipeline_of(path: Path) -> Any:
    """Transformers' pipeline for the checkpoint in `path`."""
    from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast, pipeline

    config = json.loads((path / "tokenizer_config.json").read_text())
    specials = {name: config[name] for name in ("unk_token", "pad_token") if name in config}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **specials)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    model = AutoModelForTokenClassification.from_pretrained(path, dtype="float32").eval()
    return pipeline("token-classification", model=model, tokenizer=tokenizer, device="cpu")


def plain(found: list[dict[str, Any]]) -> list[tuple[str, int, int, float]]:
    """Entities of a pipeline, as label, start, end and score."""
    return [
        (str(each.get("entity_group", each.get("entity"))), int(each["start"]), int(each["end"]), float(each["score"]))
        for each in found
    ]
