"""Tokenizers in other formats than tokenizer.json: the ids equal those of their own libraries, and each error is one
sentence.

One conversion of each kind runs in a real process, which imports transformers for seconds, without torch; the others
run in the test's process. Tests whose libraries are not installed are skipped.
"""

import base64
import errno
import io
import json
import os
import re
import resource
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from packaging.version import Version

from tests import tokenizers_for_tests as made
from vllm_lite.client.streams.stream import load_tokenizer
from vllm_lite.client.text.detokenizer import Detokenizer, vocabulary
from vllm_lite.client.text.templates.template_source import TemplateSource
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.client.text.tokenizer_formats import conversion, conversion_process
from vllm_lite.client.text.tokenizer_formats.conversion import ForeignTokenizer
from vllm_lite.client.text.tokenizer_formats.conversion_process import MORE_TEXTS, TEXTS, ConversionSettings, write
from vllm_lite.errors import ModelError

LINES = ["the cat sat on the mat.", "naïve café été", "hello world, this is 123", "x = 12; return x", "日本語 text"]
CHAT = [{"role": "system", "content": "the"}, {"role": "user", "content": "the cat"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-lite" / "tokenizers"


def folder_with(path: Path, **files: Any) -> Path:
    """Make a folder with these files; a dict is written as JSON. `__` in a name becomes a point."""
    path.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def module(name: str) -> Any:
    pytest.importorskip(name, reason=f"{name} is not installed")
    return import_module(name)


def vocabulary_files() -> dict[str, Any]:
    """A byte-level tokenizer as GPT-2's checkpoints have it."""
    model = json.loads(made.byte_level())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    text = "#version: 0.2\n" + "\n".join(merges) + "\n"
    return {"vocab__json": vocab, "merges__txt": text.encode(), "config__json": {"model_type": "gpt2"}}


def tiktoken_file() -> bytes:
    tokens = [bytes((value,)) for value in range(256)] + [b"th", b"the", b" the", b" c", b" ca", b" cat", b"12"]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def sentencepiece_file(kind: str = "bpe") -> bytes:
    """Train a model of Llama's kind: a space before each text, byte tokens, spaces that stay as they are."""
    trainer, out = module("sentencepiece").SentencePieceTrainer, io.BytesIO()
    trainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=out,
        model_type=kind,
        vocab_size=380,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im|>"],
        minloglevel=2,
    )
    return out.getvalue()


def tekken_file() -> dict[str, Any]:
    tokens = [base64.b64decode(line.split()[0]) for line in tiktoken_file().splitlines()]
    specials = "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    specials += "[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] "
    specials += "[/SYSTEM_PROMPT] [TOOL_CONTENT]"
    num_specials = len(specials.split()) + 3
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + num_specials,
        "default_num_special_tokens": num_specials,
        "version": "v7",
    }
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]
    named = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(specials.split())]
    return {"config": config, "vocab": entries, "special_tokens": named}


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions have no process of their own, and so no limits."""

    def spawn(_: str, settings: ConversionSettings, __: str, on_exit: Callable[[str], None]) -> SimpleNamespace:
        reason = f"exit status {write(settings)}"
        on_exit(reason)
        return SimpleNamespace(exited=lambda: reason, stop=lambda _: None)

    monkeypatch.setattr(conversion, "supervise", SimpleNamespace(spawn=spawn))


def refused(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("no process may be started")


# ---- what is converted


def test_a_vocabulary_with_merges(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second load takes what is in the cache, and needs no library; a file that changes is converted again."""
    folder = folder_with(tmp_path / "model", **vocabulary_files())
    assert list(conversion.made(folder)) == []
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in (*TEXTS, *MORE_TEXTS, "a<|endoftext|>b", " two  spaces"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
    (place,) = conversion.made(folder)
    assert list(cache.iterdir()) == [place]
    assert place.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("vllm_lite.client.text.tokenizer_formats.conversion.supervise.spawn", refused)
    monkeypatch.setattr("vllm_lite.client.text.tokenizer_formats.conversion.is_installed", lambda _: False)
    assert Tokenizer.load(folder).encode("the") == ours.encode("the")
    (folder / "config.json").write_text('{"model_type": "opt"}')
    assert list(conversion.made(folder)) == []
    with pytest.raises(
        ModelError, match=r"converting its vocab\.json needs transformers, which is not installed: pip "
    ):
        Tokenizer.load(folder)


@pytest.mark.usefixtures("in_this_process")
def test_a_vocabulary_as_opt_has_it(tmp_path: Path) -> None:
    """Here add_bos_token counts, as there is no post-processor yet; added tokens have a file of their own."""
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config = {name: {**token, "content": text} for name, text in names.items()}
    files = vocabulary_files()
    files["vocab__json"] |= {"</s>": len(files["vocab__json"]), "<pad>": len(files["vocab__json"]) + 1}
    files["added_tokens__json"] = {"<mine>": len(files["vocab__json"])}
    files["tokenizer_config__json"] = {**config, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    folder = folder_with(tmp_path / "model", **{**files, "config__json": {"model_type": "opt"}})
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in (*TEXTS, *MORE_TEXTS, "a<mine>b</s>"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    assert ours.encode("the")[0] == ours.added_tokens["</s>"]
    assert ours.added_tokens["<mine>"] in ours.encode("a<mine>b")


def test_a_tokenizer_model_of_tiktoken(tmp_path: Path) -> None:
    special = {"content": "<|b|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"added_tokens_decoder": {"263": {**special, "single_word": False}}, "bos_token": "<|b|>"}
    files = {"tokenizer__model": tiktoken_file(), "config__json": {"model_type": "llama"}}
    folder = folder_with(tmp_path / "model", **files, tokenizer_config__json=config)
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in (*TEXTS, *MORE_TEXTS, "<|b|>the cat 1234"):
        assert ours.encode(text) == theirs(text).input_ids
    assert ours.encode("<|b|>")[-1] == 263
    assert theirs("the cat").input_ids == [257, 261]
    bare = folder_with(tmp_path / "bare", **files)
    with pytest.raises(
        ModelError, match=r"neither it nor tokenizer_config\.json has any special tokens; get the check"
    ):
        Tokenizer.load(bare)


CONFIGS: dict[str, Any] = {
    "declared": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False},
    "declared with BOS": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>"},
    "wrongly declared": {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False},
    "not declared": None,
}


@pytest.mark.parametrize("case", CONFIGS)
def test_sentencepiece(tmp_path: Path, case: str, request: pytest.FixtureRequest) -> None:
    """If the config leads transformers to other tokens than SentencePiece's, the conversion is another one."""
    if case != "declared":
        request.getfixturevalue("in_this_process")
    files: dict[str, Any] = {} if CONFIGS[case] is None else {"tokenizer_config__json": CONFIGS[case]}
    model = sentencepiece_file()
    folder = folder_with(tmp_path / "model", tokenizer__model=model, config__json={"model_type": "llama"}, **files)
    ours, theirs = Tokenizer.load(folder), module("sentencepiece").SentencePieceProcessor(model_proto=model)
    for text in (*TEXTS, *MORE_TEXTS):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
        stream = Detokenizer(vocabulary(ours))
        assert "".join([*(stream.feed([each]) for each in ours.encode(text)), stream.flush()]) == text
    begins = oracle(folder)("the").input_ids[0] == 1 if case == "not declared" else "BOS" in case  # not from 5.24 on
    assert (ours.encode("the")[0] == 1) is begins
    assert ours.special_ids >= {1, 2}
    assert ours.token_id("<|im|>") == theirs.piece_to_id("<|im|>")


@pytest.mark.usefixtures("in_this_process")
def test_a_tokenizer_that_differs_from_sentencepiece_is_refused(tmp_path: Path) -> None:
    """Since 5.24 transformers reads this model as sentencepiece does; before it took it for byte pairs, and the result
    is refused."""
    model = sentencepiece_file("unigram")
    folder = folder_with(tmp_path / "model", tokenizer__model=model, config__json={"model_type": "llama"})
    if Version(version("transformers")) < Version("5.24"):
        with pytest.raises(
            ModelError, match=r"the tokenizer that transformers makes has tokens .* for 'the cat sat on the mat'"
        ):
            Tokenizer.load(folder)
        return
    ours, theirs = Tokenizer.load(folder), module("sentencepiece").SentencePieceProcessor(model_proto=model)
    for text in (*TEXTS, *MORE_TEXTS):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)


def test_tekken(tmp_path: Path) -> None:
    """Texts, and chats by the template that mistral-common makes, have the ids of mistral-common."""
    module("mistral_common")
    folder = folder_with(tmp_path / "model", tekken__json=tekken_file(), config__json={"model_type": "mistral"})
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in (*TEXTS, *MORE_TEXTS):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.encode(text)[0] == 1
    from vllm_lite.client.chat import ChatTokenizer

    chats = ChatTokenizer(ours, folder)
    for chat in (CHAT, [*CHAT, {"role": "assistant", "content": "sat"}, CHAT[1]]):
        wanted = theirs.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert chats.apply_chat_template(chat) == wanted
    (folder / "chat_template.jinja").write_text("{{ bos_token }}own")
    Tokenizer.load(folder)
    found = TemplateSource.load(folder)
    assert found is not None
    assert (found.source, found.special_tokens["bos_token"]) == ("{{ bos_token }}own", "<s>")


# ---- failures


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"tokenizer_class": "GemmaTokenizer"}, "transformers makes turns 'the cat sat on the mat' into '"),
        (
            {},
            "no tokenizer_class in tokenizer_config.json says what kind of tokenizer it is; get the checkpoint with a",
        ),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    """The letters of the vocabulary encode bytes, but no file, or a wrong one, says which pre-tokenizer maps them."""
    files = {**vocabulary_files(), "config__json": {"model_type": "unknown"}, "tokenizer_config__json": config}
    folder = folder_with(tmp_path / "model", **files)
    with pytest.raises(ModelError, match=says):
        Tokenizer.load(folder)


def test_a_tokenizer_json_is_preferred(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", tokenizer__json=json.loads(made.byte_level()), tekken__json={})
    assert conversion.find(folder) is None
    assert conversion.folder_of(folder) == folder
    assert conversion.find(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15", "sentencepiece"),
        ("spiece.model", b"", "sentencepiece"),
        ("tokenizer.model.v3", b"\n\x0e", "sentencepiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken"),
        ("tiktoken.model", b"IQ== 0\n", "tiktoken"),
        ("qwen.tiktoken", b"IQ== 0\n", "tiktoken"),
        ("tekken.json", b"{}", "tekken"),
    ],
)
def test_a_missing_library_is_named_with_its_purpose(
    tmp_path: Path, name: str, content: bytes, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_lite.client.text.tokenizer_formats.conversion.is_installed", lambda _: False)
    (tmp_path / name).write_bytes(content)
    found = conversion.find(tmp_path)
    assert found == conversion.ForeignTokenizer(kind, tmp_path / name)  # type: ignore[arg-type]
    needs = conversion.NEEDS[found.kind]
    with pytest.raises(ModelError) as caught:
        load_tokenizer(None, str(tmp_path))  # the folder has a tokenizer, so continuing without one would be wrong
    assert f"converting its {name} needs {' and '.join(needs.modules)}, which are not installed" in str(caught.value)
    assert f"pip install 'vllm-lite[{needs.extra}]'" in str(caught.value)


def test_installed_libraries_are_found() -> None:
    assert conversion.is_installed("transformers")
    assert not conversion.is_installed("no_such_library")
    assert not conversion.is_installed("no_such_library.part")


@pytest.mark.usefixtures("in_this_process")
def test_a_damaged_file_is_one_sentence(tmp_path: Path, cache: Path) -> None:
    files = {**vocabulary_files(), "vocab__json": b"{"}
    folder = folder_with(tmp_path / "model", **files)
    with pytest.raises(
        ModelError, match=r"vocab\.json cannot be converted into a tokenizer\.json: \w+: [^\n]*; get the "
    ):
        Tokenizer.load(folder)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("in_this_process")
def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    folder = folder_with(tmp_path / "model", **vocabulary_files(), tokenizer_config__json=config)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": config["auto_map"]}))
    with pytest.raises(ModelError, match="cannot be converted"):
        Tokenizer.load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("limit", "says"), [("time", "within 0 s"), ("memory", "it takes more than 64 MiB of memory; get the")]
)
def test_time_and_memory_are_bounded(
    tmp_path: Path, cache: Path, limit: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path / "model", **vocabulary_files())
    if limit == "time":
        monkeypatch.setattr(conversion, "CONVERT_S", 0)
    else:
        monkeypatch.setattr(conversion, "ConversionSettings", partial(ConversionSettings, max_memory_bytes=64 << 20))
    with pytest.raises(ModelError, match=says):
        Tokenizer.load(folder)
    assert list(cache.iterdir()) == []


LACKS_MEMORY = "it takes more than 64 MiB of memory"


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        (MemoryError(), LACKS_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "site-packages"), LACKS_MEMORY),
        (ImportError("libtoken.so: failed to map segment from shared object"), LACKS_MEMORY),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "merges.txt"), "No such file"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lack_of_memory_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: Exception, says: str, wrapped: bool
) -> None:
    def reads(file: Path) -> NoReturn:
        if not wrapped:
            raise failed
        raise RuntimeError(f"{file} cannot be read: {failed}") from failed

    monkeypatch.setitem(conversion_process._WAYS, "vocabulary", [reads])
    assert write(ConversionSettings("vocabulary", "vocab.json", str(tmp_path), max_memory_bytes=64 << 20)) == 1
    assert says in (tmp_path / conversion_process.ERROR_FILE).read_text()


@pytest.mark.parametrize("failed", [OSError(errno.ENOSPC, "No space"), OSError(errno.EDQUOT, "Quota"), "os error 28"])
def test_a_full_disk_needs_no_room_to_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: OSError | str
) -> None:
    def saves(folder: Path) -> NoReturn:
        del folder
        raise failed if isinstance(failed, OSError) else Exception(f"No space left on device ({failed})")

    (tmp_path / conversion_process.ERROR_FILE).symlink_to("/dev/full")
    monkeypatch.setattr(conversion_process, "_converted", lambda _: SimpleNamespace(save_pretrained=saves))
    assert write(ConversionSettings("gguf", "model.gguf", str(tmp_path))) == conversion_process.NO_SPACE


def test_a_full_disk_is_called_so(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", **vocabulary_files())
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "tokenizer.json").symlink_to("/dev/full")
    says = re.escape(
        f"a converted tokenizer cannot be kept in {tmp_path} (No space left on device); set XDG_CACHE_HOME"
    )
    with pytest.raises(ModelError, match=says):
        conversion.convert(ForeignTokenizer("vocabulary", folder / "vocab.json"), draft)


@pytest.mark.parametrize(
    ("hard", "most"), [(resource.RLIM_INFINITY, 64 << 20), (1 << 30, 64 << 20), (3 << 20, 3 << 20)]
)
def test_the_memory_limit_is_at_most_that_of_the_shell(monkeypatch: pytest.MonkeyPatch, hard: int, most: int) -> None:
    """The kernel refuses to raise what `ulimit -v` has set."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    settings = ConversionSettings("vocabulary", "vocab.json", "out", max_memory_bytes=64 << 20)
    assert conversion_process.limit_memory(settings).max_memory_bytes == most
    assert limits == [(most, most)]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = folder_with(tmp_path / "model", **vocabulary_files())
    with pytest.raises(
        ModelError, match=r"cannot be kept in .*file/vllm-lite/tokenizers \(Not a directory\); set XDG_"
    ):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("part", "whose"),
    [(part, whose) for part in (".", "..", "tokenizer.json") for whose in ("another user's", "everybody's")][:-1],
)
def test_files_of_another_user_are_not_used(
    tmp_path: Path, part: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path / "model", **vocabulary_files())
    place = conversion._place(folder)
    place.mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o700)
    (place / "tokenizer.json").write_bytes(made.byte_level())
    assert conversion.folder_of(folder) == place
    if whose == "everybody's":
        (place / part).chmod(0o777)
    else:
        stat = Path.stat
        theirs = (place / part).stat()

        def stat_as_theirs(path: Path, **options: Any) -> Any:
            found = stat(path, **options)
            if found.st_ino != theirs.st_ino:
                return found
            return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:10]))

        monkeypatch.setattr(Path, "stat", stat_as_theirs)
    for ask in (conversion.folder_of, conversion.made):
        with pytest.raises(ModelError, match="is not trusted; set XDG_CACHE_HOME"):
            ask(folder)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ModelError, match="has no home; set XDG_CACHE_HOME"):
        conversion.folder_of(folder_with(tmp_path / "model", **vocabulary_files()))


def test_two_may_convert_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two concurrent conversions finds the folder of the first, and uses it."""
    folder = folder_with(tmp_path / "model", **vocabulary_files())

    def convert(_: Any, draft: Path) -> None:
        other = conversion._place(folder)
        if not other.exists():
            other.mkdir()
            (other / "tokenizer.json").write_bytes(made.byte_level())
        (draft / "tokenizer.json").write_bytes(b"late")

    monkeypatch.setattr(conversion, "convert", convert)
    assert Tokenizer.load(folder).vocab_size == Tokenizer(made.byte_level()).vocab_size
