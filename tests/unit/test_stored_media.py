"""Vectors of media on disk: written once they are computed, found by requests that may share them, and loaded while a
request waits. Whatever fails, is late or has no room is computed, and no step reads vectors that its workers lack."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.disk_rig import DiskRig, Moving
from tests.scheduler_rig import expected
from vllm_lite.engine.encoder_cache import EncoderSizes
from vllm_lite.engine.stored_media import StoredMedia
from vllm_lite.protocol.spans import Media
from vllm_lite.protocol.transfers import MEDIUM, LoadEncoded, StoreEncoded

SIZES = [3, 2, 5, 1]
"""Vectors of each of the images that there are."""
PLACEHOLDER = 1


def shown(parts: list[int | list[int]]) -> tuple[list[int], tuple[Media, ...]]:
    """The tokens and the media of a prompt of texts and images."""
    tokens, media = list[int](), list[Media]()
    for part in parts:
        if isinstance(part, list):
            tokens += part
        else:
            media.append(Media("image", bytes([part]) * 32, SIZES[part], len(tokens)))
            tokens += [PLACEHOLDER] * SIZES[part]
    return tokens, tuple(media)


class MediaRig(DiskRig):
    """A rig whose model takes images, with a disk tier."""

    def __init__(self, room: int = 12, host_room: int = 0, **options: Any) -> None:
        super().__init__(encoder=EncoderSizes(8, room, host_room), **options)
        self.worker.gets_media = True
        self.media = self.kv.part(StoredMedia)

    def _new_worker(self) -> Any:
        worker = super()._new_worker()
        worker.gets_media = True
        return worker

    def show(self, name: str, parts: list[int | list[int]], max_tokens: int = 3, **params: Any) -> list[int]:
        tokens, media = shown(parts)
        self.add(name, tokens, max_tokens, media=media, **params)
        return tokens

    def look(self, name: str, parts: list[int | list[int]], **params: Any) -> int:
        """Serve a request alone, and return how many images were computed for it."""
        before = self.worker.num_encoded
        tokens = self.show(name, parts, **params)
        self.drain()
        assert self.output(name) == expected(tokens, 3)
        return self.worker.num_encoded - before

    def compute_aside(self) -> None:
        """Have images computed without delaying sequences that decode."""
        assert self.encoder is not None
        self.encoder.others_decode = self.scheduler.queues.any_decodes

    def vectors_alone(self) -> "MediaRig":
        """Another engine over a disk that has lost all KV."""
        return MediaRig(contents={key: each for key, each in self.contents.items() if key.endswith(MEDIUM)})


TEXT, OTHER = [7, 8, 9], [20, 21, 22, 23, 24]


def test_a_restarted_engine_that_has_lost_the_kv_runs_no_tower_again() -> None:
    rig = MediaRig()
    assert rig.look("a", [TEXT, 0, TEXT, 1, OTHER]) == 2
    again = rig.vectors_alone()
    assert again.look("a", [TEXT, 0, TEXT, 1, OTHER]) == 0
    assert again.look("elsewhere", [OTHER, 1, OTHER]) == 0, "it is with the workers"
    assert ("loaded_media", {"media": 2}) in again.decisions
    assert again.media.num_loaded == 2
    assert len(again.loads_of_media) == 2


def test_where_kv_covers_an_image_its_vectors_stay_on_disk() -> None:
    rig = MediaRig()
    rig.look("a", [TEXT, 0, OTHER])
    again = MediaRig(contents=rig.contents)
    assert again.look("a", [TEXT, 0, OTHER, 1, TEXT]) == 1
    assert len(again.loads) == 1
    assert not again.loads_of_media


def test_an_image_is_written_once() -> None:
    rig = MediaRig(room=3)
    prompts: list[list[int | list[int]]] = [[TEXT, 0, TEXT], [OTHER, 0, TEXT], [TEXT, 1, TEXT], [OTHER, OTHER, 0]]
    for number, parts in enumerate(prompts):
        rig.look(f"{number}", parts)
    assert sum(key.endswith(MEDIUM) for key in rig.contents) == 2


@pytest.mark.parametrize(
    ("params", "finds"),
    [({}, True), ({"cache_salt": "mine"}, True), ({"prompt_logprobs": 0}, False)],
    ids=["plain", "salt", "scored"],
)
def test_salts_are_apart_and_scored_prompts_leave_nothing(params: dict[str, Any], finds: bool) -> None:
    rig = MediaRig()
    rig.look("a", [TEXT, 0, OTHER], **params)
    assert rig.vectors_alone().look("b", [OTHER, 0, TEXT], **({} if params else {"cache_salt": "other"})) == 1
    again = rig.vectors_alone().look("c", [OTHER, 0, TEXT], **(params if finds else {}))
    assert again == (0 if finds else 1)


def held(rig: MediaRig) -> MediaRig:
    """Another engine, with a request whose image is being loaded."""
    again = rig.vectors_alone()
    again.holds = True
    again.show("waits", [TEXT, 0, OTHER])
    again.step()
    assert not again.scheduler.running
    assert [type(each) for each in again.pending] == [LoadEncoded]
    return again


@pytest.fixture
def seen() -> MediaRig:
    rig = MediaRig()
    rig.look("a", [TEXT, 0, OTHER])
    return rig


def test_others_run_while_vectors_are_sent_for(seen: MediaRig) -> None:
    again = held(seen)
    again.add("runs", [40] * 5, 4)
    for count in range(1, 4):
        again.step()
        assert len(again.output("runs")) == count
    assert not again.output("waits")
    assert any(code == "waits_for_load" for code, _ in again.decisions)
    again.drain()
    assert again.worker.num_encoded == 0


def test_two_that_show_the_same_send_for_it_once(seen: MediaRig) -> None:
    again = held(seen)
    again.show("too", [OTHER, 0, TEXT])
    again.step()
    assert not again.scheduler.running
    again.drain()
    assert len(again.loads_of_media) == 1
    assert again.worker.num_encoded == 0


def test_vectors_that_fail_to_load_are_computed_and_not_loaded_again(seen: MediaRig) -> None:
    again = seen.vectors_alone()
    again.fails = lambda key: key.endswith(MEDIUM)
    assert again.look("a", [TEXT, 0, OTHER]) == 1
    assert len(again.loads_of_media) == 1
    assert again.tier.num_failed == 1


def test_late_vectors_are_computed_and_freed_on_arrival(seen: MediaRig) -> None:
    again = held(seen)
    (load,) = again.loads_of_media
    again.scheduler.transfer_late(load.ticket)
    while again.scheduler.requests:
        again.step()
    assert again.worker.num_encoded == 1
    again.scheduler.reset_prefix_cache()  # the image is dropped before it arrives
    again.add("more", [5, 6], 2)
    while again.scheduler.requests:
        again.step()
    assert not again.worker.encoded
    again.end(load)
    assert again.worker.encoded
    again.add("once more", [5, 6], 2)
    again.drain()
    assert not again.worker.encoded


def test_a_running_sequence_computes_vectors_that_have_not_arrived(seen: MediaRig) -> None:
    """Two thirds of a prompt are computed when another one sends for the image in its last third."""
    again = seen.vectors_alone()
    again.holds = True
    again.scheduler.stored_keys([], list(again.contents))
    tokens = again.show("runs", [[30] * 30, 0, OTHER])
    again.step()
    again.scheduler.stored_keys(list(again.contents), [])
    again.show("waits", [TEXT, 0, OTHER])
    for _ in range(9):
        again.step()
    assert len(again.loads_of_media) == 1
    assert again.output("runs") == expected(tokens, 3)
    assert not again.output("waits")
    again.drain()
    assert again.worker.num_encoded == 1


def test_only_vectors_that_fit_together_are_loaded() -> None:
    rig = MediaRig()
    rig.look("a", [0, TEXT, 1, TEXT, 2, OTHER, 3, TEXT])
    contents = {key: each for key, each in rig.contents.items() if key.endswith(MEDIUM)}
    again = MediaRig(room=6, contents=contents)
    assert again.look("a", [0, TEXT, 1, TEXT, 2, OTHER, 3, TEXT]) == 2, "5 vectors beside 3 and 2 are too many"
    assert [load.digest[0] for load in again.loads_of_media] == [0, 1]


def test_vectors_that_are_forgotten_before_they_are_sent_for_again_are_not_lost(seen: MediaRig) -> None:
    """The workers have still to be told to forget an image when another prompt shows it."""
    again = seen.vectors_alone()
    assert again.look("a", [TEXT, 0, OTHER]) == 0
    again.scheduler.reset_prefix_cache()  # the entry waits for a step
    assert again.look("b", [OTHER, 0, OTHER]) == 1


def test_a_reset_including_the_disk_removes_pending_writes() -> None:
    rig = MediaRig()
    rig.holds = True
    rig.show("a", [TEXT, 0, OTHER])
    while rig.scheduler.requests:
        rig.step()
    (store,) = [each for each in rig.pending if isinstance(each, StoreEncoded)]
    rig.scheduler.reset_prefix_cache(stored=True)
    rig.send()
    rig.end(store)
    rig.send()
    assert not any(key.endswith(MEDIUM) for key in rig.contents)
    assert not any(key.endswith(MEDIUM) for key in rig.tier.index)
    rig.drain()


def test_more_than_there_is_room_for_is_not_on_its_way_to_the_disk() -> None:
    rig = MediaRig(room=8)
    rig.holds = True
    rig.show("a", [0, TEXT, 1, TEXT, 2, OTHER, 3, TEXT])
    while rig.scheduler.requests:
        rig.step()
    stores = [each for each in rig.pending if isinstance(each, StoreEncoded)]
    assert [store.digest[0] for store in stores] == [0, 1, 3]
    assert rig.tier.writes.num_dropped == 1
    rig.drain()


def test_vectors_computed_aside_are_written_when_complete() -> None:
    rig = MediaRig(host_room=9)
    rig.compute_aside()
    rig.holds = True
    rig.add("runs", [40] * 5, 12)
    rig.step()
    rig.show("a", [0, OTHER])
    rig.show("b", [1, OTHER])
    while rig.worker.num_encoded < 2:
        assert not any(isinstance(each, StoreEncoded) for each in rig.pending), "the first is not there"
        rig.step()
    assert [each.digest[0] for each in rig.pending if isinstance(each, StoreEncoded)] == [0]
    while len(rig.scheduler.requests) > 1:
        rig.step()
    assert [each.digest[0] for each in rig.pending if isinstance(each, StoreEncoded)] == [0, 1]
    rig.drain()
    assert sum(key.endswith(MEDIUM) for key in rig.contents) == 2


def test_vectors_not_yet_computed_are_not_moved_to_the_host() -> None:
    """The image of the aborted request is not needed any more, and another image needs the room."""
    rig = MediaRig(room=5, host_room=9)
    rig.compute_aside()
    rig.add("runs", [40] * 5, 30)
    rig.step()
    rig.show("a", [2, OTHER])
    rig.step()
    rig.abort("a")
    assert list(rig.worker.aside) == [bytes([2]) * 32]
    rig.abort("runs")
    assert rig.look("b", [0, OTHER]) == 1
    assert not rig.worker.encoded_on_host
    assert not rig.worker.aside


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_random_programs_never_read_missing_vectors(seed: int) -> None:
    draw = random.Random(seed)
    room, host_room = draw.choice([5, 7, 12]), draw.choice([0, 4, 9])
    rig = MediaRig(room, host_room, num_blocks=draw.choice([14, 24]), depth=draw.choice([1, 2]))
    rig.holds = True
    if draw.random() < 0.5:
        rig.compute_aside()
    rig.fails = lambda _: draw.random() < 0.05
    moved: dict[int, list[int]] = {}
    prompts: dict[str, list[int]] = {}

    def move(message: Moving) -> None:
        """Bytes are moved some time before the engine hears of it."""
        if message.ticket not in moved:
            moved[message.ticket] = rig._move(message)

    for number in range(80):
        if draw.random() < 0.3 and len(rig.scheduler.requests) < 5:
            parts: list[int | list[int]] = []
            for _ in range(draw.randint(1, 4)):
                parts += [[draw.randrange(2, 5)] * draw.randint(1, 6), draw.randrange(4)]
            prompts[f"r{number}"] = rig.show(f"r{number}", [*parts, OTHER[: draw.randint(1, 5)]])
        if rig.pending and draw.random() < 0.4:
            move(draw.choice(rig.pending))
        ready = [each for each in rig.pending if each.ticket in moved]
        if ready and draw.random() < 0.5:
            message = draw.choice(ready)
            rig.pending.remove(message)
            rig.scheduler.transferred(message.ticket, moved.pop(message.ticket))
            rig.scheduler.check_integrity()
        if draw.random() < 0.06:
            rig.scheduler.reset_prefix_cache(stored=draw.random() < 0.2)
        if draw.random() < 0.05 and (loads := [each for each in rig.pending if isinstance(each, LoadEncoded)]):
            rig.scheduler.transfer_late(draw.choice(loads).ticket)
        if draw.random() < 0.03 and rig.scheduler.requests:
            rig.abort(draw.choice(list(rig.scheduler.requests)))
        if draw.random() < 0.02:
            rig.pending, moved = [], {}
            rig.lose_workers()
            rig.replace_workers()
            rig.scheduler.stored_keys(list(rig.contents), [])
        rig.step()
    for message in list(rig.pending):
        move(message)
        rig.pending.remove(message)
        rig.scheduler.transferred(message.ticket, moved[message.ticket])
    rig.drain()
    for name, prompt in prompts.items():
        if rig.reasons.get((name, 0)) == "length":
            assert rig.output(name) == expected(prompt, 3)
    rig.scheduler.reset_prefix_cache()
    rig.add("last", [5, 6], 2)
    rig.drain()
    assert not rig.worker.encoded | rig.worker.encoded_on_host | rig.worker.aside.keys(), (
        "the workers keep vectors that nobody knows of"
    )
