"""The demo model's grammar accepts the texts that it writes and rejects others; the model's files are complete and
small."""

import json
import math
import random
import struct
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from vllm_lite.config import demo_folder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo_model"))
import grammar  # noqa: E402 - found only once the example is on the path

MODEL = Path(demo_folder())
STORY = (
    "Once upon a time there was a clever fox named Mila. She loved berry pie more than anything else. "
    "One morning, Mila could not find her red kite. “Where is my red kite?” asked Mila. "
    "Just then Otto the owl came by. “Do not worry, we will find it together,” said Otto. "
    "And there it was, behind the oak tree, safe and sound. And so Mila and Otto lived happily ever after. 🦊"
)
HOWTO = (
    "How to make tea:\nYou will need a cup, a kettle and some tea leaves. First, boil the water. "
    "Then, put the tea leaves into the cup. Finally, take out the leaves and add a little honey. Enjoy your tea! 🍵"
)


def refused(text: str) -> list[str]:
    return [sentence for sentence, accepted in grammar.judge(text) if not accepted]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_everything_written_is_accepted():
    num_sentences = 0
    for seed in range(1500):
        text = grammar.write_document(random.Random(seed))
        verdicts = list(grammar.judge(text))
        assert all(accepted for _, accepted in verdicts), (seed, refused(text))
        assert max(len(sentence) for sentence, _ in verdicts) < grammar.MAX_SENTENCE_CHARS
        num_sentences += len(verdicts)
    assert num_sentences > 10_000


def test_text_is_accepted_without_its_special_tokens():
    """A client's text has no special tokens; documents then follow one another without even a space."""
    for seed in range(300):
        rng = random.Random(seed)
        text = grammar.write_plain(rng) + grammar.write_plain(rng)
        assert not refused(text), seed


def test_every_template_is_accepted():
    """Includes templates that documents rarely use."""
    for name, plot in grammar.PLOTS.items():
        for template in {*plot.asks, *(template for stage in plot.stages for template in stage.templates)}:
            for seed in range(5):
                sentence = grammar.Writer(random.Random(seed)).sentence(template)
                assert grammar.accepts(sentence), (name, sentence)


def test_examples_are_accepted():
    assert grammar.check_text(STORY) == (8, 8)
    assert grammar.check_text(HOWTO) == (6, 6)
    assert grammar.accepts("Once upon a time there was an honest owl named Łukasz.")


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (STORY, "She loved", "He loved"),  # the pronoun of the hero
        (STORY, "her red kite", "his red kite"),
        (STORY, "asked Mila", "asked Nora"),  # an unknown name
        (STORY, "my red kite", "my blue scarf"),  # another object than the lost one
        (STORY, "🦊", "🦉"),  # the emoji of the other animal
        (STORY, "a clever fox", "an clever fox"),
        (STORY, "Otto the owl", "Mila the owl"),  # two of one name
        (STORY, "behind the oak tree", "behind the tree oak"),
        (STORY, "could not find", "could not finds"),
        (HOWTO, "boil the water", "boil the cup"),
        (HOWTO, "Enjoy your tea", "Enjoy your bread"),
        (HOWTO, "a kettle", "a kettle a kettle"),
    ],
)
def test_a_wrong_word_is_refused(text, right, wrong):
    assert text.count(right) == 1
    assert len(refused(text.replace(right, wrong))) >= 1


def test_wrong_order_and_repetition_are_refused():
    found, lost = "And there it was, behind the oak tree, safe and sound.", "“Where is my red kite?” asked Mila."
    swapped = STORY.replace(lost, "@").replace(found, lost).replace("@", found)
    assert refused(swapped)
    assert refused(STORY.replace(lost, f"{lost} {lost}")) == [lost]
    assert refused(STORY + " Enjoy your tea!") == ["Enjoy your tea!"]


def test_shuffled_words_are_refused():
    """The negative control: with two neighbouring words swapped, next to nothing is accepted."""
    rng = random.Random(0)
    accepted = total = 0
    for sentence in [s for _ in range(200) for s in grammar.split_sentences(grammar.write_plain(rng))]:
        words = sentence.split()
        if len(words) < 3:
            continue
        place = rng.randrange(len(words) - 1)
        words[place], words[place + 1] = words[place + 1], words[place]
        if words != sentence.split():
            total += 1
            accepted += grammar.accepts(" ".join(words))
    assert total > 1000
    assert accepted / total < 0.03


def test_an_unfinished_sentence_is_not_counted():
    for end in range(len(STORY)):
        accepted, total = grammar.check_text(STORY[:end])
        assert accepted == total, STORY[:end]


def test_endless_noise_is_refused():
    assert grammar.check_text("the kite the kite " * 50) == (0, 1)
    assert grammar.check_text("“never closed. " * 60)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Zoë met Łukasz at the café. 🦊",
        "日本語 — ½ ﷽",
        "a\n\n\tb  c",
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "\x00\x7f\u200b",
        "e\u0301",
        STORY,
        HOWTO,
    ],
)
def test_the_tokenizer_round_trips(tokenizer, text):
    bos = tokenizer.token_to_id(grammar.BOS)
    ids = tokenizer.encode(text).ids
    assert ids[0] == bos
    assert ids[1:] == tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text


def test_the_tokenizer_splits_characters(tokenizer):
    """Emoji and accents span tokens on purpose: a stream must hold bytes back until a character is whole."""
    for text, num_bytes in (("🦊", 4), ("ë", 2), ("Ł", 2)):
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == num_bytes
    assert 1000 <= tokenizer.get_vocab_size() <= 4096


def test_the_files():
    names = {path.name for path in MODEL.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 8_000_000


def test_the_weights(tokenizer):
    with (MODEL / "model.safetensors").open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert 1_000_000 <= sum(math.prod(tensor["shape"]) for tensor in header.values()) <= 3_500_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()


def test_the_tokens_that_configs_name(tokenizer):
    tokens = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert tokens["bos_token"] == grammar.BOS
    assert tokens["eos_token"] == grammar.EOS
    assert generation["eos_token_id"] == [tokenizer.token_to_id(grammar.EOS), tokenizer.token_to_id(grammar.END)]
    assert all(token in tokens["chat_template"] for token in (grammar.USER, grammar.ASSISTANT, grammar.END))
