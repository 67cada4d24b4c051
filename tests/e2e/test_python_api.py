"""The Python API against a real engine: docs/python-api.md, and chats as transformers would render them."""

import asyncio
import gc
import os
import re
import signal
from itertools import chain
from pathlib import Path
from select import select
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.deadlines import scaled
from tests.e2e.reference import start
from vllm_lite import LLM, AsyncClient, RequestOutputKind, SamplingParams
from vllm_lite.client.engines.launch import resolve
from vllm_lite.config import EngineConfig
from vllm_lite.engine.blocks.manager import KVCacheManager
from vllm_lite.engine.core import EngineCore
from vllm_lite.errors import EngineError, RequestError
from vllm_lite.worker.model_runner import ModelRunner

ROOT = Path(__file__).parents[2]
CHAT = [
    {"role": "user", "content": "Tell me a story."},
    {"role": "assistant", "content": "Once upon a time there was a cat."},
    {"role": "user", "content": "  Go on.  "},
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.mark.parametrize(
    ("name", "shown", "num_lines"),
    [
        ("docs/python-api.md", "Once upon a time", 11),
        ("README.md", " ", 2),
        ("docs/structured-outputs.md", '"age": ', 1),
    ],
)
def test_every_example_of_the_documentation_runs(
    name: str, shown: str, num_lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples of a page run one after the other, in one script."""
    for setting, value in {"CPU_THREADS": "1", "NUM_GPU_BLOCKS_OVERRIDE": "256", "LOG_LEVEL": "error"}.items():
        monkeypatch.setenv(f"VLLM_LITE_{setting}", value)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), name, "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out
    assert shown in printed
    assert len(printed.splitlines()) >= num_lines


@pytest.fixture(scope="module")
def llm() -> Any:
    with start("demo", single_process=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(EngineConfig(model="demo")).model)


@pytest.mark.parametrize("settings", [{"data_parallel_size": 2}, {}])
def test_a_forked_process_neither_uses_nor_ends_the_engine(settings: dict[str, Any]) -> None:
    """As multiprocessing does by default before Python 3.14; sys.exit() there calls the finalizers of all objects."""
    with start("demo", single_process=False, **settings) as llm:
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                said = repr(llm.generate(["One"], GREEDY, use_tqdm=False))
            except EngineError as error:
                said = str(error)
            llm.close()
            os.write(writes, said.encode())
            os._exit(0)
        try:
            assert select([reads], [], [], scaled(10))[0], "the forked process waits"
            assert "was forked from the one that launched the engine" in os.read(reads, 4096).decode()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reads)
            os.close(writes)
        [output] = llm.generate(["One"], GREEDY)
        assert len(output.outputs[0].token_ids) == 20


def test_an_engine_in_this_process_is_freed_with_all_that_it_made() -> None:
    """Its threads take the place of processes; objects of processes would be excluded from garbage collection."""
    frozen = gc.get_freeze_count()
    with start("demo", single_process=True) as llm:
        llm.generate("Once", GREEDY, use_tqdm=False)
    del llm
    assert gc.get_freeze_count() <= frozen
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) in (EngineCore, KVCacheManager, ModelRunner)]


def test_a_chat_is_the_rendered_prompt(llm: Any, oracle: Any) -> None:
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    for chat, options in ((CHAT, {"add_generation_prompt": True}), (CHAT[:1], {}), (CHAT[:2], continued)):
        ids = oracle.apply_chat_template(chat, **({"add_generation_prompt": True} | options), return_dict=False)
        (output,) = llm.chat(chat, GREEDY, use_tqdm=False, **options)
        (expected,) = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == expected.prompt_token_ids == ids
        assert output.outputs == expected.outputs
        assert output.outputs[0].text
    both = llm.chat([CHAT, CHAT[:1]], GREEDY, use_tqdm=False)
    alone = [llm.chat(chat, GREEDY, use_tqdm=False)[0] for chat in (CHAT, CHAT[:1])]
    assert [one.outputs for one in both] == [one.outputs for one in alone]


def test_the_tokenizer_agrees_with_transformers(llm: Any, oracle: Any) -> None:
    tokenizer, text = llm.get_tokenizer(), "Łucja said: “Go on!” 🐱"
    ids = oracle(text).input_ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == oracle(text, add_special_tokens=False).input_ids
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)
    rendered = oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == rendered
    assert tokenizer.eos_token_id in (oracle.eos_token_id, *llm.engine.eos_token_ids)


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_every_kind_of_output_tells_the_same_story(llm: Any, kind: RequestOutputKind) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=30, logprobs=1, ignore_eos=True)
    (expected,) = llm.generate("One windy day,", params, use_tqdm=False)

    async with asyncio.timeout(scaled(60)):
        async with AsyncClient(llm.address) as client:
            stream = client.generate("One windy day,", params.clone(output_kind=kind))
            outputs = [output async for output in stream]
        assert outputs[-1].finished
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
        if kind is not RequestOutputKind.DELTA:
            assert outputs[-1].outputs == expected.outputs
            return
        for sample in expected.outputs:
            parts = [part for output in outputs for part in output.outputs if part.index == sample.index]
            assert "".join(part.text for part in parts) == sample.text
            assert list(chain.from_iterable(part.token_ids for part in parts)) == sample.token_ids
            assert list(chain.from_iterable(part.logprobs or [] for part in parts)) == sample.logprobs
            assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1].cumulative_logprob == pytest.approx(sample.cumulative_logprob)


async def test_an_engine_sleeps_and_gets_other_weights(tmp_path: Path) -> None:
    """By its own LLM, and by another client of it."""
    first, second = (make_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens(llm: LLM) -> list[int]:
        (output,) = llm.generate([[5, 6, 7]], greedy, use_tqdm=False)
        return output.outputs[0].token_ids

    async def operate(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.update_weights(second)
            with pytest.raises(RequestError, match="nowhere: no such folder"):
                await client.update_weights(tmp_path / "nowhere")
            await client.pause_generation("keep")
            assert await client.is_paused()
            with pytest.raises(RequestError, match="mode: must be one of abort, wait, keep, got"):
                await client.pause_generation("soon")  # type: ignore[arg-type]
            await client.sleep(2)
            assert await client.is_sleeping()
            await client.wake_up(["weights"])
            assert await client.is_sleeping()
            await client.wake_up(["kv_cache"])
            assert not await client.is_paused()

    with start(first, dtype="float32") as llm:
        before = tokens(llm)
        llm.sleep()
        with pytest.raises(RequestError, match="the engine sleeps"):
            tokens(llm)
        llm.wake_up()
        assert tokens(llm) == before
        await asyncio.wait_for(operate(llm.address), scaled(60.0))
        assert tokens(llm) != before
        llm.update_weights(first)
        assert tokens(llm) == before
