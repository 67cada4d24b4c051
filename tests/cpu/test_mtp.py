"""MTP heads: drafts equal those of the head in plain torch, whatever happened to its KV."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.batches import part_of
from tests.driver import GREEDY, WARM, Driver, make_prompt, new_request
from tests.families.hybrid import VARIANTS as HYBRIDS
from tests.families.latent import VARIANTS as LATENT
from tests.families.mixtures import VARIANTS as MIXTURES
from tests.images import make_qwen
from tests.mtp_heads import HeadTwin, add_head
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.mtp_head import FAMILIES, head_spec
from vllm_lite.kernels.cpu.program import NotRecordable
from vllm_lite.models.decoder import Decoder
from vllm_lite.protocol.step import BlockOp, Continue, Draft, Finish, Fork, Preempt, ReplaceBlock, Resume, States
from vllm_lite.worker.drafting.mtp import MTPDrafter
from vllm_lite.worker.graphs import Graph
from vllm_lite.worker.sampling.drafter import DraftBatch, Drafted, GrammarDrafter, on_host
from vllm_lite.worker.step_parts.drafts import Drafts

DRAFTS = 3
PROMPT = make_prompt(30, seed=11)


VARIANTS = {each.name: each for each in (*MIXTURES, *LATENT, *HYBRIDS)}
OTHERS = {f"{each.name} ({each.model})": each for each in VARIANTS.values() if each.model in FAMILIES}
"""All variants of checkpoints with supported heads."""
GLM = next(name for name, each in VARIANTS.items() if each.model == "Glm4MoeForCausalLM")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_head(VARIANTS[GLM].make(tmp_path_factory.mktemp("model") / "glm"))


@pytest.fixture(scope="module")
def twin(model: Path) -> HeadTwin:
    return HeadTwin(model)


class Twin(Protocol):
    """Drafts as they should be."""

    def drafts(self, tokens: list[int], count: int, unknown: tuple[int, ...] = ()) -> list[int]: ...


class Watched(Driver):
    """Holds all drafts to the twin's."""

    def __init__(self, model: Path, twin: Twin, host: int = 0, **settings: Any) -> None:
        own: dict[str, Any] = {"speculative_config": {"method": "glm4_moe_mtp", "num_speculative_tokens": DRAFTS}}
        super().__init__(model, host, max_model_len=256, **(own | settings))
        drafter = part_of(self.worker.runner, Drafts).drafter
        assert drafter is not None
        self.before, drafter.before = drafter.before, self.watch  # type: ignore[method-assign]
        self.twin, self.num_drafts = twin, 0
        self.unknown: tuple[int, ...] = ()

    def watch(self, batch: DraftBatch) -> Sequence[Drafted]:
        drafts = self.before(batch)
        for tokens, most, drafted in zip(batch.tokens, batch.max_drafts, drafts, strict=True):
            assert len(drafted) == most
            self.num_drafts += len(drafted)
            assert on_host(drafted).tolist() == self.twin.drafts(tokens.tolist(), most, self.unknown)
        return drafts

    def draft(self, *handles: int, steps: int = 3) -> None:
        for _ in range(steps):
            self.run(*(Draft(handle, DRAFTS, []) for handle in handles))


@pytest.fixture
def watched(model: Path, twin: HeadTwin) -> Watched:
    return Watched(model, twin)


def blocks(first: int) -> list[int]:
    return list(range(first, first + 6))


def test_drafts_are_the_heads(watched: Watched) -> None:
    """Prompts come in chunks, and some steps have no drafts."""
    watched.run(new_request(0, PROMPT, blocks(1), num_tokens=13), new_request(1, PROMPT[::-1], blocks(8)))
    watched.run(Continue(0, 17, []), Draft(1, DRAFTS, []))
    watched.draft(0, 1)
    watched.decode(0, count=2)
    watched.draft(1, 0)
    assert watched.num_drafts == DRAFTS * 13


def test_a_head_has_no_vision_tower(tmp_path: Path) -> None:
    """The model sees the images, and the head reads its hidden states."""
    spec = load_spec(make_qwen(tmp_path / "model"))
    assert spec.vision is not None
    assert head_spec(spec).vision is None


def test_steps_with_a_head_are_recorded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying steps, decode steps, the passes of the head, and its KV writes after each step are recorded."""

    def play() -> None:
        watched.draft(0, 1)
        watched.draft(1, steps=1)
        watched.decode(0, 1, count=1)
        watched.run(Draft(0, DRAFTS, []), Continue(1, 1, []))

    watched.run(new_request(0, PROMPT, blocks(1)), new_request(1, PROMPT[::-1], blocks(8)))
    play()

    def forbidden(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError

    for name in ("forward", "logits"):
        monkeypatch.setattr(Decoder, name, forbidden)
    play()


def test_only_kv_writes_that_cannot_be_recorded_run_eagerly(watched: Watched) -> None:
    drafts = part_of(watched.worker.runner, Drafts).drafter
    assert isinstance(drafts, GrammarDrafter)
    assert isinstance(drafts.other, MTPDrafter)
    writer, recorded = drafts.other._writer, list[int]()
    capture = writer._capture
    assert capture is not None

    def refused(prepare: Callable[[], None], run: Callable[[], None]) -> Graph:
        recorded.append(len(recorded))
        if len(recorded) == 1:
            raise NotRecordable("the first size")
        return capture(prepare, run)

    writer._capture = refused  # type: ignore[assignment]
    watched.run(new_request(0, PROMPT, blocks(1)), new_request(1, PROMPT[::-1], blocks(8)))
    for _ in range(2):
        watched.draft(0, 1)
        watched.draft(1, 0, steps=1)
        watched.decode(0, 1, count=1)
    kept = list(writer._graphs.values())
    assert len(recorded) == len(kept) > 1
    assert [graph is None for graph in kept] == [True] + [False] * (len(kept) - 1)


def test_recorded_steps_have_the_drafts_of_eager_ones(model: Path, twin: HeadTwin) -> None:
    """With temperatures, too."""
    found = []
    for eager in (False, True):
        driver, drafts = Watched(model, twin, enforce_eager=eager), list[list[list[int]]]()
        drafter = part_of(driver.worker.runner, Drafts).drafter
        assert drafter is not None

        def keep(batch: DraftBatch, driver: Watched = driver, drafts: list[list[list[int]]] = drafts) -> Sequence[Any]:
            made = driver.before(batch)
            drafts.append([on_host(each).tolist() for each in made])
            return made

        drafter.before = keep  # type: ignore[method-assign]
        driver.run(
            new_request(0, PROMPT, blocks(1), sampling=WARM), new_request(1, PROMPT[::-1], blocks(8), sampling=WARM)
        )
        for counts in ((3, 1), (2, 3), (1, 1)):
            driver.run(*(Draft(handle, count, []) for handle, count in enumerate(counts)))
        found.append((drafts, driver.got))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", OTHERS)
def test_drafts_of_each_family(name: str, tmp_path: Path) -> None:
    variant = OTHERS[name]
    model = add_head(variant.make(tmp_path / "model"))
    watched = Watched(model, HeadTwin(model))
    states = (States(0, 0, 1, []), States(1, 0, 2, [])) if watched.ready.num_state_slots else ()
    watched.run(new_request(0, PROMPT, blocks(1)), new_request(1, PROMPT[::-1], blocks(8)), *states)
    watched.draft(0, 1, steps=2)
    assert watched.num_drafts == DRAFTS * 4


def test_a_prefix_hit(watched: Watched) -> None:
    """The hidden state before its first token is not known."""
    watched.run(new_request(0, PROMPT, blocks(1)))
    watched.draft(0, steps=1)
    watched.run(Finish(0))
    watched.unknown = (16,)
    prompt = [*PROMPT[:16], *PROMPT[:9]]
    watched.run(new_request(0, prompt, [1, *blocks(9)], num_computed=16, num_cached=16, num_tokens=9))
    watched.draft(0)


def test_forks(watched: Watched) -> None:
    watched.run(new_request(0, PROMPT, blocks(1)))
    watched.draft(0, steps=1)
    length = watched.lengths[0]
    block = (length - 1) // 16
    fork = Fork(0, 1, GREEDY, length, length - 1, 0), ReplaceBlock(1, 0, block, 20)
    copy = ((int(BlockOp.COPY), 1 + block, 20),)
    watched.run(*fork, Draft(1, DRAFTS, [[21, 22, 23]]), Draft(0, DRAFTS, []), ops=copy)
    watched.draft(0, 1)


@pytest.mark.parametrize("by", ["swap", "recompute"])
def test_preemption(model: Path, twin: HeadTwin, by: str) -> None:
    driver = Watched(model, twin, 4)
    driver.run(new_request(0, PROMPT, blocks(1)))
    driver.draft(0, steps=1)
    length = driver.lengths[0]
    pairs = [(1 + index, 42 - index) for index in range(-(-(length - 1) // 16))]
    out = tuple((int(BlockOp.SWAP_OUT), *pair) for pair in pairs)
    driver.run(Preempt(0), ops=out if by == "swap" else ())
    driver.run(new_request(1, PROMPT[::-1], blocks(1)))
    if by == "swap":
        back = tuple((int(BlockOp.SWAP_IN), host, 20 + index) for index, (_, host) in enumerate(pairs))
        driver.run(Resume(0, length - 1, 0, 1, [blocks(20)]), ops=back)
    else:
        driver.run(Resume(0, 0, 0, length, [blocks(20)]))
    driver.draft(0, 1)
