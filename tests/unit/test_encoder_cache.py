"""The encoder cache: vectors that workers hold, media that a step may compute, and sequences that wait for them."""

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lite.engine.blocks.pool import BlockPool
from vllm_lite.engine.encoder_cache import MAX_STEP_BYTES, EncoderCache, EncoderSizes, encoder_sizes
from vllm_lite.engine.sequence import Sequence as Seq
from vllm_lite.engine.sequence import Status
from vllm_lite.protocol.encoder import DemoteEncoded, Encode, EncodeAside, FreeEncoded, PromoteEncoded
from vllm_lite.protocol.spans import Media

SIZES = [2, 3, 5, 9, 4, 1]
"""Vectors of each of the images that there are."""
STEP_TOKENS = 12


class Reader:
    """A sequence with a prompt of words and images, as far as the cache looks at it."""

    def __init__(self, images: list[int], gap: int, *, ends_with_text: bool = True) -> None:
        self.media, start = list[Media](), gap
        for image in images:
            self.media.append(Media("image", bytes([image]) * 32, SIZES[image], start))
            start += SIZES[image] + gap
        self.length = start + 1 if ends_with_text or not images else self.media[-1].end
        self.contents = {medium.digest: medium.digest * 2 for medium in self.media}
        self.request = self
        self.num_computed = self.num_output = 0
        self.status = Status.RUNNING


class Workers:
    """The vectors of all ranks, which do as they are told: frees and encodes in the order of a step's entries."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.on_host: dict[bytes, int] = {}
        self.aside: set[bytes] = set()
        """Digests of media whose vectors are still being computed."""
        self.num_encoded = 0

    def follow(self, entries: list[Any], sizes: EncoderSizes) -> None:
        encoded = [entry for entry in entries if isinstance(entry, Encode)]
        if len(encoded) > 1:
            assert sum(entry.num_tokens for entry in encoded) <= sizes.budget
        for entry in entries:
            if isinstance(entry, FreeEncoded):
                for digest in entry.digests:
                    del (self.held if digest in self.held else self.on_host)[digest]
                    self.aside.discard(digest)
            elif isinstance(entry, DemoteEncoded):
                assert not self.aside & set(entry.digests), "demoted before it is there"
                self.on_host |= {digest: self.held.pop(digest) for digest in entry.digests}
            elif isinstance(entry, PromoteEncoded):
                self.held |= {digest: self.on_host.pop(digest) for digest in entry.digests}
            else:
                assert entry.digest not in self.held | self.on_host, "computed although it is held"
                if isinstance(entry, EncodeAside):
                    assert not self.aside, "two are computed aside"
                    self.aside.add(entry.digest)
                self.held[entry.digest] = entry.num_tokens
                self.num_encoded += 1
        assert len(self.held) <= 1 or sum(self.held.values()) <= sizes.room
        assert sum(self.on_host.values()) <= sizes.host_room


def cache_of(budget: int, room: int, host_room: int = 0, *, whole: bool = False) -> EncoderCache:
    return EncoderCache(cast(BlockPool, None), EncoderSizes(budget, room, host_room), whole_media=whole)


def as_seq(reader: Reader) -> Seq:
    return cast(Seq, reader)


def step(cache: EncoderCache, workers: Workers, readers: list[Reader]) -> int:
    """Compute up to STEP_TOKENS tokens of all of them together; return how many there were."""
    cache.begin_step()
    left, spans = STEP_TOKENS, list[tuple[Reader, int, int]]()
    for reader in readers:
        if reader.status is not Status.RUNNING:
            continue
        wanted = min(left, reader.length - reader.num_computed)
        count = cache.reachable(as_seq(reader), reader.num_computed, wanted)
        assert 0 <= count <= wanted
        spans.append((reader, reader.num_computed, reader.num_computed + count))
        left -= count
    workers.follow(cache.take_entries(), cache.sizes)
    for reader, start, end in spans:
        for medium in reader.media if start < end else ():
            if medium.end > start and medium.start < end:
                assert medium.digest in workers.held, "read without its vectors"
                assert not cache.whole_media or medium.end <= end, "a step ends inside a medium"
                assert medium.digest not in workers.aside or not cache.others_decode(), "read before it is there"
                workers.aside.discard(medium.digest)  # vectors that a step reads are completed first
        reader.num_computed = end
    cache.check_integrity([as_seq(reader) for reader in readers])
    if cache.most_beside is not None and cache.others_decode() and not cache.whole_media:
        places = ((medium, start, end) for reader, start, end in spans for medium in reader.media)
        assert (
            sum(max(0, min(end, each.end) - max(start, each.start)) for each, start, end in places)
            <= cache.most_beside()
        )
    return STEP_TOKENS - left


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 3), st.booleans()), min_size=1, max_size=5
)
events = st.lists(
    st.sampled_from(["step", "step", "step", "preempt", "resume", "again", "end", "reset", "decode", "learn"]),
    max_size=30,
)


@settings(max_examples=300)
@given(
    prompts,
    events,
    st.tuples(st.integers(1, 12), st.integers(1, 20), st.integers(0, 12)),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 4)),
    st.randoms(),
)
def test_steps_have_the_vectors_that_they_read_and_all_prompts_end(
    given_prompts: list[tuple[list[int], int, bool]],
    given_events: list[str],
    sizes: tuple[int, int, int],
    whole: bool,
    most_beside: int | None,
    chance: Any,
) -> None:
    cache, workers = cache_of(*sizes, whole=whole), Workers()
    readers = [Reader(images, gap, ends_with_text=text) for images, gap, text in given_prompts]
    decoding = [False]
    cache.others_decode = lambda: decoding[0]
    cache.most_beside = None if most_beside is None else lambda: most_beside
    for event in given_events:
        reader = chance.choice(readers)
        if event == "step":
            step(cache, workers, chance.sample(readers, len(readers)))
        elif event == "preempt" and reader.status is Status.RUNNING:
            reader.status = Status.PREEMPTED
            cache.release(as_seq(reader))
            reader.num_computed = chance.choice([0, reader.num_computed])  # recomputed, or swapped
        elif event == "resume":
            reader.status = Status.RUNNING
        elif event == "again":
            cache.release(as_seq(reader))
            reader.num_computed = 0
        elif event == "end":
            cache.release(as_seq(reader))
            reader.num_computed = reader.length
        elif event == "reset":
            cache.reset()
        elif event == "decode":
            decoding[0] = not decoding[0]
        elif event == "learn":
            cache.learn(workers.aside)
            workers.aside.clear()
    decoding[0] = False
    for reader in readers:
        reader.status = Status.RUNNING
    for _ in range(200):
        if all(reader.num_computed == reader.length for reader in readers):
            break
        assert step(cache, workers, readers) > 0, "nobody gets on"
    assert all(reader.num_computed == reader.length for reader in readers)
    cache.begin_step()
    cache.reset()
    workers.follow(cache.take_entries(), cache.sizes)
    assert not workers.held | workers.on_host


def test_images_of_a_chat_are_computed_once() -> None:
    """Also if every pass reads the prompt from its beginning."""
    cache, workers = cache_of(8, 30), Workers()
    for _ in range(20):
        reader = Reader([0, 1, 2, 0], 2)
        while reader.num_computed < reader.length:
            step(cache, workers, [reader])
        cache.release(as_seq(reader))
    assert cache.num_encoded == 3


def test_the_least_recently_used_go_first() -> None:
    cache, workers = cache_of(100, 10), Workers()
    for images in ([0], [1], [2], [0], [4]):  # 2, 3 and 5 vectors fill it; the first is read again, and 4 more come
        reader = Reader(images, 1)
        while reader.num_computed < reader.length:
            step(cache, workers, [reader])
        cache.release(as_seq(reader))
    assert [digest[0] for digest in workers.held] == [0, 4]


def test_evicted_vectors_are_loaded_from_the_host() -> None:
    """5 vectors fit on the device and 8 on the host: three images are computed once, a fourth pushes one out."""
    cache, workers = cache_of(100, 5, 8), Workers()
    for image, num_encoded in ((0, 1), (1, 2), (2, 3), (0, 3), (1, 3), (2, 3), (4, 4), (0, 5)):
        reader = Reader([image], 1)
        while reader.num_computed < reader.length:
            step(cache, workers, [reader])
        cache.release(as_seq(reader))
        assert workers.num_encoded == num_encoded, image


def test_a_medium_larger_than_the_budget_is_computed_alone() -> None:
    cache, workers = cache_of(4, 4), Workers()
    large, small = Reader([3], 0), Reader([5], 0)
    cache.begin_step()
    assert cache.reachable(as_seq(small), 0, 2) == 2
    assert cache.reachable(as_seq(large), 0, 5) == 0, "the step computes another"
    workers.follow(cache.take_entries(), cache.sizes)
    small.num_computed = small.length
    cache.begin_step()
    assert cache.reachable(as_seq(large), 0, 5) == 5
    assert cache.reachable(as_seq(Reader([0], 0)), 0, 2) == 0


def test_media_are_computed_aside_while_others_decode() -> None:
    """One medium at a time. A waiting sequence gets it when the workers report it, or when no sequence decodes any
    more."""
    cache, decoding = cache_of(100, 100), [True]
    cache.others_decode = lambda: decoding[0]
    one, other = Reader([2], 2), Reader([1], 0)

    def step(reader: Reader, count: int) -> tuple[int, list[Any]]:
        cache.begin_step()
        return cache.reachable(as_seq(reader), reader.num_computed, count), cache.take_entries()

    [first] = [medium.digest for medium in one.media]
    assert step(one, 5) == (2, [EncodeAside(first, 5, first * 2)]), "the words before it"
    one.num_computed = 2
    assert step(one, 5) == (0, [])
    assert step(other, 3) == (0, []), "it is not its turn"
    cache.learn([first])
    assert step(one, 5) == (5, [])
    count, [entry] = step(other, 3)
    assert (count, type(entry)) == (0, EncodeAside)
    decoding[0] = False
    assert step(other, 3) == (3, []), "the step that reads it has the rest computed"
    cache.learn([entry.digest])
    one.num_computed = 7
    cache.reset()
    cache.check_integrity([as_seq(one), as_seq(other)])


def test_tokens_of_media_are_limited_while_others_decode() -> None:
    """The limit is for all media of a step together. Tokens that were counted in the step are not counted again, and a
    sequence that is being admitted gets at least one."""
    cache, decoding = cache_of(100, 100), [False]
    cache.others_decode, cache.most_beside = (lambda: decoding[0]), lambda: 3
    first, second, words = Reader([2], 8), Reader([2], 8), Reader([], 20)

    def step() -> list[int]:
        cache.begin_step()
        asked = ((first, 8, 2), (first, 8, 5), (second, 8, 5), (first, 0, 12), (first, 13, 7), (words, 0, 20))
        return [cache.reachable(as_seq(reader), start, count) for reader, start, count in asked]

    assert step() == [2, 5, 5, 12, 7, 20]
    decoding[0] = True
    assert step() == [2, 3, 0, 8, 7, 20], "text before an image and behind it is not"
    second.status = Status.WAITING
    assert step() == [2, 3, 1, 8, 7, 20], "who waits comes in"
    second.num_output = 1
    assert step() == [2, 3, 5, 8, 7, 20], "a stream that was preempted goes on as fast as it can"


def test_a_step_carries_few_bytes() -> None:
    cache = cache_of(100, 100)
    one, other = Reader([0], 0), Reader([1], 0)
    for reader in (one, other):
        reader.contents = dict.fromkeys(reader.contents, bytes(MAX_STEP_BYTES * 2 // 3))
    cache.begin_step()
    assert cache.reachable(as_seq(one), 0, 3) == 3
    assert cache.reachable(as_seq(other), 0, 4) == 0
    cache.begin_step()
    assert cache.reachable(as_seq(other), 0, 4) == 4


def test_the_sizes_of_an_engine() -> None:
    assert encoder_sizes(2048) == (2048, 8192, 0)
    assert encoder_sizes(16384, 500) == (16384, 16384, 500)


def test_a_reset_frees_at_once_or_once_it_has_been_read() -> None:
    cache, workers, reader = cache_of(100, 100), Workers(), Reader([0, 1], 1)
    cache.begin_step()
    assert cache.reachable(as_seq(reader), 0, 4) == 4, "the first image, and a word behind it"
    workers.follow(cache.take_entries(), cache.sizes)
    reader.num_computed = 2
    cache.reset()
    workers.follow(cache.take_entries(), cache.sizes)
    assert [digest[0] for digest in workers.held] == [0], "a vector of it has not been read"
    reader.num_computed = 4
    cache.begin_step()
    workers.follow(cache.take_entries(), cache.sizes)
    assert not workers.held


def test_a_whole_medium_is_computed_in_one_step_or_not_at_all() -> None:
    cache, reader = cache_of(100, 100, whole=True), Reader([3, 2], 2)  # 2 words, 9 vectors, 2 words, 5 vectors, 3 words
    assert cache.uncut(as_seq(reader)) == 9
    cache.begin_step()
    assert cache.reachable(as_seq(reader), 0, 10) == 2
    assert not cache.take_entries(), "vectors that nobody reads are not computed"
    assert cache.reachable(as_seq(reader), 2, 8) == 0
    assert cache.reachable(as_seq(reader), 2, 9) == 9
    assert cache.reachable(as_seq(reader), 0, 17) == 13
    assert cache.reachable(as_seq(reader), 5, 5) == 0, "a beginning that was found does not change where it ends"
    assert cache.reachable(as_seq(reader), 5, 6) == 6
    reader.num_computed = 11
    assert cache.uncut(as_seq(reader)) == 5
    reader.num_computed = reader.length - 1
    assert cache.uncut(as_seq(reader)) == 0
    assert cache_of(100, 100).uncut(as_seq(Reader([3], 2))) == 0
