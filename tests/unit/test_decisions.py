"""Typed decisions in the client: what is asked, the prompts, the tokens of labels, the answers."""

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests import tokenizers_for_tests as made
from vllm_lite.client.decisions import methods, shared
from vllm_lite.client.decisions.answers import ChoiceAnswer, NoulAnswer, ScoreAnswer, answer_of
from vllm_lite.client.decisions.methods import variables_of
from vllm_lite.client.decisions.questions import Question, read_instructions, read_questions, read_state
from vllm_lite.client.decisions.reads import label_ids, make_reads
from vllm_lite.client.decisions.shared import MARK, REPLY, SharedText, encoded, rendered, rendering
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.errors import RequestError

NOUL = {"type": "noul", "instructions": "Is it?"}


def one(**fields: Any) -> Question:
    (question,) = read_questions({"q": fields})
    return question


def test_each_type_has_its_labels_and_its_text():
    choice = one(type="choice", instructions="Which?", criteria={"a b": "first", "c": None, "d": {"x": [1, "é"]}})
    assert choice.names == ("a b", "c", "d")
    assert choice.labels == (("A",), ("B",), ("C",))
    assert choice.text == 'Question: Which?\nA: a b - first\nB: c\nC: d - {"x": [1, "é"]}'
    noul = one(type="noul", instructions=" Is it? ", criteria={"false": "it is not"})
    assert noul.labels == (("yes", "Yes"), ("no", "No"))
    assert noul.text == "Question: Is it?\nno: it is not\nYes or no?"
    assert one(type="noul", criteria={"true": "it is"}).text == "yes: it is\nYes or no?"
    score = one(type="score", instructions={"how": "much"}, criteria=["low", "high"])
    assert score.labels == (("0",), ("1",))
    assert score.text == 'Question: {"how": "much"}\n0: low\n1: high'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "rank"}, "question 'q': type must be one of choice, noul, score, got 'rank'"),
        ({"type": "noul"}, "question 'q': give instructions"),
        ({"type": "noul", "instructions": "x", "options": []}, "question 'q': Object contains unknown field `options`"),
        ({"instructions": "x"}, "question 'q': Object missing required field `type`"),
        ("x", "question 'q': Expected `object`, got `str`"),
        ({**NOUL, "criteria": {"maybe": "x"}}, 'criteria of a noul must be an object of descriptions of "true"'),
        ({**NOUL, "criteria": ["x"]}, "criteria of a noul must be an object"),
        ({"type": "choice", "criteria": {}}, "of 1 to 26 options, each with a description or null, got 0"),
        ({"type": "choice", "criteria": ["a", "b"]}, r"of 1 to 26 options, .* got \['a', 'b'\]"),
        ({"type": "choice", "criteria": dict.fromkeys(map(str, range(27)))}, "of 1 to 26 options, .* got 27"),
        ({"type": "choice", "criteria": {" ": None}}, "the name of an option must be a text, got ' '"),
        ({"type": "choice", "criteria": {"a": object()}}, "the description of 'a' must be a text or JSON"),
        ({"type": "score", "criteria": ["a"]}, "a list of 2 to 10 levels, from the lowest on, got 1"),
        ({"type": "score", "criteria": list("abcdefghijk")}, "a list of 2 to 10 levels, .* got 11"),
        ({"type": "score", "criteria": {"a": "b"}}, "a list of 2 to 10 levels"),
        ({"type": "score", "criteria": ["a", "a"]}, "the levels of a score must be different texts"),
        ({"type": "score", "criteria": ["a", None]}, "the levels of a score must be different texts"),
    ],
)
def test_a_question_that_is_wrong_is_refused_by_its_id(fields, message):
    with pytest.raises(RequestError, match=message):
        read_questions({"fine": NOUL, "q": fields})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "questions must be an object with at least one question"),
        ([NOUL], "questions must be an object"),
        ({str(number): NOUL for number in range(65)}, "questions takes at most 64 questions, got 65"),
        ({"": NOUL}, "the id of a question must be a text of 1 to 256 characters, got ''"),
        ({"x" * 257: NOUL}, "the id of a question must be a text of 1 to 256 characters"),
    ],
)
def test_questions_are_bounded(given, message):
    with pytest.raises(RequestError, match=message) as caught:
        read_questions(given)
    assert len(str(caught.value)) < 300


def test_a_state_is_a_text_or_json():
    assert read_state(" as it is\n") == " as it is\n"
    assert read_state({"a": [1, "é"]}) == '{"a": [1, "é"]}'
    assert read_instructions(None) == ""
    assert read_instructions(" be fair ") == "be fair"
    for wrong in (None, "", " \n"):
        with pytest.raises(RequestError, match="state must be a text or JSON"):
            read_state(wrong)
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError, match="state must be a text or JSON: "):
        read_state(nested)


def test_thinking_is_off():
    assert variables_of(None) == {"enable_thinking": False}
    assert variables_of({"enable_thinking": False, "x": 1}) == {"enable_thinking": False, "x": 1}
    with pytest.raises(RequestError, match="enable_thinking must be false"):
        variables_of({"enable_thinking": True})
    with pytest.raises(RequestError, match="chat_template_kwargs must be a dict, got str"):
        variables_of("x")  # type: ignore[arg-type]


# ---- prompts


def nouls(*texts: str) -> list[Question]:
    return read_questions({str(place): {**NOUL, "instructions": text} for place, text in enumerate(texts)})


def each_alone(state: str, questions: list[Question], render: Any) -> list[str]:
    return [render(f"{REPLY}\n\n{state}\n\n{question.text}") for question in questions]


@pytest.mark.parametrize(
    ("state", "render", "num_renders"),
    [
        ("a state", lambda said: f"<user>{said}</user><assistant>", 2),
        (f"with the {MARK} in it", lambda said: f"<user>{said}</user>", 2),
        ("a state", lambda said: f"<user>{said}</user>{said}", 5),
        ("a state", lambda said: f"<user>{said.strip()}</user>", 2),
        ("a state", lambda said: f'{{"said": {json.dumps(said)}}}', 5),  # the lines of a question are escaped
        ("a state", lambda said: f"<{len(said)}>{said}", 5),  # the text before a question depends on the question
        ("a state", lambda _: "<user>", 5),
    ],
)
def test_shared_rendering_gives_each_questions_own_prompt(state, render, num_renders):
    questions = nouls("One?", "Is this another one?", "One", "the fourth\nof them")
    calls: list[str] = []

    def counted(said: str) -> str:
        calls.append(said)
        return str(render(said))

    text = rendered(rendering(state, questions), counted)
    assert [text.whole(index) for index in range(4)] == each_alone(state, questions, render)
    assert len(calls) == num_renders


def test_one_question_is_rendered_once():
    calls: list[str] = []
    text = rendered(rendering("state", nouls("One?")), lambda said: calls.append(said) or f"<{said}>")  # type: ignore[func-returns-value]
    assert (len(calls), text.rests) == (1, [f"<{calls[0]}>"])


def test_without_a_template_a_prompt_ends_in_a_word():
    text = shared.plain("state", nouls("One?", "Two?"), "be fair")
    assert text.whole(1) == f"be fair\n\n{REPLY}\n\nstate\n\nQuestion: Two?\nYes or no?\nAnswer:"
    assert shared.plain("state", nouls("One?"), "").begin == f"{REPLY}\n\nstate\n\n"


KINDS = {
    "byte level": made.byte_level(),
    "byte level, NFC": made.byte_level(nfc=True),
    "SentencePiece": made.byte_fallback(),
    "SentencePiece, no space": made.byte_fallback(strip=0, bos=False),
    "SentencePiece, added": made.byte_fallback_added(),
    "metaspace": made.metaspace(),
    "word pieces": made.word_piece(),
}
PIECES = st.sampled_from(
    [" the", "the", " ", "\n", "\n\n", "é", "猫", "🙂", " cat sat", "two words", "<s>", ".", "e\u0301"]
)
BEGINNINGS = st.lists(PIECES, min_size=350, max_size=700)
RESTS = st.lists(st.lists(PIECES, max_size=8), min_size=2, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(begin=BEGINNINGS, rests=RESTS)
def test_shared_tokenizing_gives_each_prompts_own_tokens(kind, begin, rests):
    tokenizer = Tokenizer(KINDS[kind])
    text = SharedText("".join(begin), ["".join(rest) for rest in rests])

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    assert encoded(text, encode) == [encode(text.whole(index)) for index in range(len(rests))]


def test_the_beginning_is_tokenized_twice_however_many_questions_there_are():
    tokenizer = Tokenizer(made.byte_level())
    text = SharedText(" the cat sat." * 1000, [f" the {number}?" for number in range(64)])
    sizes: list[int] = []

    def encode(part: str) -> list[int]:
        sizes.append(len(part))
        return tokenizer.encode(part, add_special_tokens=False)

    encoded(text, encode)
    assert sum(size > 1000 for size in sizes) == 2


def test_a_prompt_that_changes_the_shared_tokens_is_tokenized_whole():
    def encode(part: str) -> list[int]:
        return [ord(letter) + 1000 * ("!" in part) for letter in part]

    text = SharedText(" the cat sat." * 100, ["a", "b!", "c"])
    assert encoded(text, encode) == [encode(text.whole(index)) for index in range(3)]


# ---- labels


def words(*more: str) -> Tokenizer:
    """A byte-level tokenizer with these words beside its bytes, which are joined from the left."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in more:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    tokenizer = Library(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|turn|>"])
    return Tokenizer(tokenizer.to_str().encode())


def found(tokenizer: Tokenizer, text: str, question: Question) -> list[list[str]]:
    (options,) = label_ids(tokenizer, text, tokenizer.encode(text, add_special_tokens=False), [question])
    return [[tokenizer.decode([token_id]) for token_id in ids] for ids in options]


def test_labels_are_the_tokens_that_begin_a_reply():
    plain = words("yes", "Yes", "no", "No")
    assert found(plain, "x <|turn|>assistant\n", one(**NOUL)) == [["yes", "Yes"], ["no", "No"]]
    assert found(plain, "x <|turn|>", one(**NOUL)) == [["yes", "Yes"], ["no", "No"]]
    only_small = words("yes", "no")
    assert found(only_small, "x\n", one(**NOUL)) == [["yes"], ["no"]]
    spaced = words("Ġyes", "Ġno", "ĠA", "ĠB")
    assert found(spaced, "x\nAnswer:", one(**NOUL)) == [[" yes"], [" no"]]
    assert found(spaced, "x\nAnswer:", one(type="choice", criteria={"x": None, "y": None})) == [[" A"], [" B"]]
    long = "the cat sat. " * 5000
    assert found(plain, f"{long}<|turn|>assistant\n", one(type="score", criteria=["a", "b"])) == [["0"], ["1"]]
    assert found(plain, long.replace("\n", " ") + "x\n", one(**NOUL)) == [["yes", "Yes"], ["no", "No"]]


def test_a_label_of_several_tokens_is_refused():
    with pytest.raises(
        RequestError, match=r"question 'q': 'yes' is not one token .*, so this model cannot answer a noul"
    ):
        found(words("no", "Yes"), "x\n", one(**NOUL))
    with pytest.raises(RequestError, match="'A' is not one token"):
        found(words("Ġyes"), "x\nAnswer:", one(type="choice", criteria={"x": None}))


def test_a_label_that_joins_the_previous_token_is_refused():
    with pytest.raises(RequestError, match="'0' is not one token"):
        found(words("Ġ0", "Ġ1"), "x ", one(type="score", criteria=["a", "b"]))


# ---- requests


def test_a_prompt_without_a_template_begins_with_the_special_tokens_of_a_text():
    """Even where the text that these are found by has the same token."""
    library = words("yes", "Yes", "no", "No").library
    x = library.token_to_id("x")
    library.post_processor = processors.TemplateProcessing("x $A", special_tokens=[("x", x)])
    made: list[Any] = []
    limits = SimpleNamespace(max_model_len=4096)
    factory: Any = SimpleNamespace(
        tokenizer=Tokenizer(library.to_str().encode()), limits=limits, make=lambda prompt, *_: made.append(prompt)
    )
    questions = nouls("One?", "Two?")
    make_reads(factory, questions, SharedText("state\n", ["1\n", "2\n"]), {}, ["a", "b"], has_template=False)
    encode = factory.tokenizer.encode
    assert [each["prompt_token_ids"] for each in made] == [encode("state\n1\n"), encode("state\n2\n")]
    assert made[0]["prompt_token_ids"][0] == x
    assert made[0]["marks"] == [1 + len("state\n")]


def test_a_request_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = SimpleNamespace(streams=[SimpleNamespace(error=None)], output=lambda: pytest.fail("nothing was computed"))
    monkeypatch.setattr(methods, "prepare", lambda *_: reads)
    llm = Mock()
    llm._follow.side_effect = RequestError("request id 'a' is in use")
    with pytest.raises(RequestError, match="'a' is in use"):
        methods.decide(llm, "state", {"q": NOUL})


# ---- answers


def test_answers_have_the_form_of_their_type():
    choice = answer_of(one(type="choice", criteria={"a": None, "b": None}), [0.25, 0.75], 0.5)
    assert choice == ChoiceAnswer("b", {"a": 0.25, "b": 0.75}, 0.375)
    assert answer_of(one(**NOUL), [0.75, 0.25], 1.0) == NoulAnswer(0.75, {"yes": 0.75, "no": 0.25}, 0.75)
    score = answer_of(one(type="score", criteria=["low", "mid", "high"]), [0.5, 0.25, 0.25], 1.0)
    legend = {"0": "low", "1": "mid", "2": "high"}
    assert score == ScoreAnswer(0.75, legend, {"0": 0.5, "1": 0.25, "2": 0.25}, 0.5)
    assert json.loads(msgspec.json.encode(score)) == {
        "type": "score",
        "score": 0.75,
        "legend": legend,
        "probabilities": {"0": 0.5, "1": 0.25, "2": 0.25},
        "confidence": 0.5,
    }


def test_the_first_of_equal_options_is_chosen():
    assert answer_of(one(type="choice", criteria={"a": None, "b": None}), [0.5, 0.5], 1.0).choice == "a"  # type: ignore[union-attr]
