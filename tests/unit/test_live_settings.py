"""The command that the page shows is the one that started the server, without its keys."""

import shlex

from vllm_lite.server.config import ServeConfig
from vllm_lite.server.live.settings import COMPUTED, settings_of

FLAGS = {
    "max_num_seqs": 3,
    "enable_prefix_caching": False,
    "public_docs": True,
    "served_model_name": "it's <b>mine</b>",
    "api_key": ("a-key",),
    "admin_api_key": ("another-key",),
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
}


def said(**settings: object) -> dict[str, object]:
    config = ServeConfig.load({"device": "cpu", **settings})
    resolved = config.resolve(max_position_embeddings=64, dtype="float32", model_path="m")
    return settings_of(config, resolved, {"instruction set": "avx2"})


def test_only_given_settings_are_in_the_command() -> None:
    words = shlex.split(str(said(**FLAGS)["command"]))
    assert words[:2] == ["vllm-lite", "serve"]
    given = dict(zip(words, [*words[1:], ""], strict=True))
    assert given["--max-num-seqs"] == "3"
    assert given["--served-model-name"] == "it's <b>mine</b>"
    assert {"--no-enable-prefix-caching", "--public-docs", "--speculative-config"} <= set(words)
    assert '"method":"ngram"' in given["--speculative-config"]
    assert not any("key" in word for word in words)
    assert len([word for word in words if word.startswith("--")]) <= len(FLAGS)


def test_computed_settings_have_their_chosen_values() -> None:
    found = said(max_num_seqs=3)
    computed = found["computed"]
    assert found["kernels"] == {"instruction set": "avx2"}
    assert isinstance(computed, dict)
    assert tuple(computed) == COMPUTED
    assert (computed["max_num_seqs"], computed["device"], computed["dtype"]) == (3, "cpu", "float32")
    assert computed["max_num_batched_tokens"] > 0
