"""Pages of the KV cache exist before blocks in them are written, and nothing is changed by that."""

import ctypes
import mmap
import resource
import threading

import pytest
import torch

from tests.deadlines import scaled
from tests.driver import NUM_BLOCKS as NUM_DRIVEN
from tests.driver import Driver, make_prompt, new_request
from vllm_lite.kernels.cpu import memory
from vllm_lite.protocol.step import Continue
from vllm_lite.worker.memory import touch_ahead
from vllm_lite.worker.memory.touch_ahead import TouchAhead, take_pages

BLOCK_BYTES, NUM_BLOCKS, AHEAD_BYTES = 1 << 20, 64, 16 << 20


def new_pool():
    return memory.zeros(NUM_BLOCKS * BLOCK_BYTES, torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)


def existing(pool):
    """For each block whether all of its pages are in memory."""
    num_pages = BLOCK_BYTES // mmap.PAGESIZE
    found = []
    for block in pool:
        resident = (ctypes.c_ubyte * num_pages)()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(BLOCK_BYTES), resident) == 0
        found.append(all(page & 1 for page in resident))
    return found


def finish(touch):
    touch.thread.join(scaled(20))
    assert not touch.thread.is_alive()


@pytest.fixture(autouse=True)
def on_a_system_that_can():
    pool = new_pool()
    if not touch_ahead.populate(pool.data_ptr(), BLOCK_BYTES):
        pytest.skip("this system makes pages only where they are written")


def test_a_limited_number_of_blocks_is_touched_before_use(monkeypatch):
    monkeypatch.setattr(touch_ahead, "PIECE_BYTES", 2 << 20)
    pool = new_pool()
    assert not any(existing(pool))
    touch = TouchAhead(pool, AHEAD_BYTES)
    touch.use(0)
    finish(touch)
    assert existing(pool) == [block < 18 for block in range(NUM_BLOCKS)]
    first = touch.thread
    touch.use(4)  # more than three quarters of the memory allocated ahead are left
    assert touch.thread is first
    touch.use(5)
    finish(touch)
    assert existing(pool) == [block < 22 for block in range(NUM_BLOCKS)]


def test_the_largest_steps_find_their_pages(monkeypatch):
    """Also after a step after which no thread had to start, and where the thread that starts with a step is late."""
    monkeypatch.setattr(touch_ahead, "PIECE_BYTES", BLOCK_BYTES)
    pool = new_pool()
    no_huge_pages = 15
    address, num_bytes = ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(pool.nbytes)
    assert ctypes.CDLL(None).madvise(address, num_bytes, no_huge_pages) == 0
    touch = TouchAhead(pool, AHEAD_BYTES)
    touch.expect(14 * BLOCK_BYTES)
    touch.use(0)
    finish(touch)
    end = 1
    for num_blocks in (7, 14, 14, 3, 14):
        faults_before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        ctypes.memset(pool[end].data_ptr(), 1, num_blocks * BLOCK_BYTES)
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults_before
        assert faults < BLOCK_BYTES // mmap.PAGESIZE // 2, f"the step of blocks {end} to {end + num_blocks - 1}"
        end += num_blocks
        touch.use(end - 1)
        finish(touch)


def test_a_thread_goes_on_to_what_is_used_meanwhile(monkeypatch):
    begun, used, populate = threading.Event(), threading.Event(), touch_ahead.populate

    def populate_late(address, num_bytes):
        begun.set()
        return used.wait(scaled(20)) and populate(address, num_bytes)

    monkeypatch.setattr(touch_ahead, "PIECE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(touch_ahead, "populate", populate_late)
    pool = new_pool()
    touch = TouchAhead(pool, AHEAD_BYTES)
    touch.use(0)
    assert begun.wait(scaled(20))
    touch.use(19)
    used.set()
    finish(touch)
    assert [block for block, exists in enumerate(existing(pool)) if exists][-1] == 35


def test_the_worker_expects_its_largest_step(tiny_checkpoint, monkeypatch):
    expected: list[int] = []
    monkeypatch.setattr(TouchAhead, "expect", lambda _, step_bytes: expected.append(step_bytes))
    worker = Driver(tiny_checkpoint).worker
    config, cache = worker.config, worker.runner.cache_engine
    num_blocks = config.max_num_batched_tokens // config.block_size * len(cache.spec.kv_groups)
    assert expected == [num_blocks * cache.pool[0].nbytes]


def test_touching_keeps_contents_and_ends_with_the_pool():
    pool = new_pool()
    pool[3], pool[-1] = 3, 9
    touch = TouchAhead(pool, AHEAD_BYTES)
    for block in range(NUM_BLOCKS):
        touch.use(block)
        finish(touch)
    assert all(existing(pool))
    last = touch.thread
    touch.use(NUM_BLOCKS - 1)
    assert touch.thread is last
    expected = torch.zeros(NUM_BLOCKS, dtype=torch.uint8)
    expected[3], expected[-1] = 3, 9
    assert torch.equal(pool, expected[:, None].expand_as(pool))


def test_blocks_to_be_filled_at_once_are_touched_up_to_three_quarters(monkeypatch):
    monkeypatch.setattr(touch_ahead, "PIECE_BYTES", 2 << 20)
    pool = new_pool()
    touch = TouchAhead(pool, AHEAD_BYTES)
    touch.make(5 * BLOCK_BYTES)
    assert existing(pool) == [block < 5 + 16 + 1 for block in range(NUM_BLOCKS)]
    touch.use(4)
    assert touch.thread is None, "there is enough ahead of what was filled"
    touch.make(4 * BLOCK_BYTES)
    assert existing(pool) == [block < 5 + 4 + 16 + 1 for block in range(NUM_BLOCKS)]
    touch.make(pool.nbytes)
    assert existing(pool) == [block < NUM_BLOCKS * 3 // 4 for block in range(NUM_BLOCKS)]
    touch.use(0)
    assert touch.thread is None
    touch.use(NUM_BLOCKS * 3 // 4)
    finish(touch)
    assert all(existing(pool))


def test_where_the_system_cannot_it_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(touch_ahead, "populate", lambda address, _: asked.append(address))
    pool = new_pool()
    touch = TouchAhead(pool, AHEAD_BYTES)
    for block in (0, 20, 40):
        touch.use(block)
        finish(touch)
    assert asked == [pool.data_ptr()]


@pytest.mark.parametrize("shape", [(0, 5), (3, 5)])
def test_small_pools_are_left_alone(shape):
    touch = TouchAhead(torch.zeros(shape), AHEAD_BYTES)
    touch.use(0)
    assert touch.thread is None


def test_the_worker_reports_the_blocks_that_its_steps_use(driver, monkeypatch):
    used: list[int] = []
    monkeypatch.setattr(driver.worker.runner.cache_engine, "use", used.append)
    prompt = make_prompt(driver.worker.config.block_size + 1)
    driver.run(new_request(1, prompt, [3, 9]))
    driver.run(Continue(1, 1, []), new_request(2, prompt, [4, 5]))
    assert used == [9, 9]
    driver.run(Continue(1, 1, []), Continue(2, 1, [[11]]))
    assert used == [9, 9, 11]


def test_a_worker_with_a_disk_has_its_blocks_where_room_was_made_while_it_loaded(tiny_checkpoint, tmp_path):
    driver = Driver(tiny_checkpoint, kv_cache_dir=str(tmp_path / "kv"))
    cache, disk = driver.worker.runner.cache_engine, driver.worker.disk
    assert disk is not None
    assert disk.pages is not None
    assert cache.pool.data_ptr() == disk.pages.pool.data_ptr()
    assert cache.pool.shape[0] == NUM_DRIVEN
    assert cache.layer_views()[0].data_ptr() == disk.pages.pool.data_ptr()
    prompt = make_prompt(driver.worker.config.block_size + 1)
    driver.run(new_request(1, prompt, [3, 9]))
    assert cache.pool[3].any()
    assert disk.pages.pool[3].any()
    disk.close(scaled(5))


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(NUM_DRIVEN - 1, 0), (NUM_DRIVEN, 2), (NUM_DRIVEN, -2)])
def test_room_of_another_size_is_left_alone(driver, num_rows, row_bytes):
    cache = driver.worker.runner.cache_engine
    before = cache.pool.data_ptr()
    cache.take(TouchAhead(torch.zeros(num_rows, cache.pool[0].nbytes + row_bytes, dtype=torch.uint8)))
    assert cache.pool.data_ptr() == before


def test_room_is_taken_if_it_is_known_how_much():
    assert take_pages(None, 10) is None
    assert take_pages(3, 0) is None
    assert take_pages(1 << 40, 1 << 20) is None, "there is no such memory"
    pages = take_pages(3, 10)
    assert pages is not None
    assert pages.pool.shape == (3, 10)
    assert pages.block_bytes == 10
