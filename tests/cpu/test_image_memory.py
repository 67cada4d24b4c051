"""Memory of image decoders: an image's bytes per pixel are known before it is decoded, and large images are decoded one
at a time."""

import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.deadlines import scaled
from tests.images import as_file
from vllm_lite.client.media.decoding import BIG_PIXELS, ORIENTATION, header_of, opened
from vllm_lite.client.media.image_pool import ImagePool
from vllm_lite.client.media.processors import TileSettings, tiles_of
from vllm_lite.client.media.sources import MAX_PIXELS, GivenImage
from vllm_lite.errors import RequestError

SETTINGS = TileSettings(32, 64)


def file_of(how: tuple[str, ...], size: tuple[int, int], *, turned: bool = False) -> bytes:
    kind, mode, *scans = how
    exif, made = Image.Exif(), BytesIO()
    exif[ORIENTATION] = 6
    more: dict[str, Any] = {"exif": exif} if turned else {}
    if scans:
        more |= {"progressive": True, "subsampling": scans[0]}
    Image.new(mode, size, 7 if mode in ("P", "L", "I;16") else 0).save(made, kind, **more)
    return made.getvalue()


FILES: dict[str, tuple[tuple[str, ...], int]] = {
    "plain": (("PNG", "RGB"), 4),
    "grey": (("PNG", "L"), 5),
    "palette": (("GIF", "P"), 5),
    "photo": (("JPEG", "RGB"), 4),
    "progressive": (("JPEG", "RGB", "4:2:0"), 7),
    "progressive with all colors": (("JPEG", "RGB", "4:4:4"), 10),
    "progressive and grey": (("JPEG", "L", "4:4:4"), 6),
    "transparent": (("PNG", "RGBA"), 8),
    "grey and transparent": (("PNG", "LA"), 8),
    "16 bits": (("PNG", "I;16"), 8),
    "CMYK": (("JPEG", "CMYK"), 8),
    "WebP": (("WEBP", "RGB"), 16),
}
SIZE = 2400, 2000
DECODE = """
import json, sys
from pathlib import Path
from vllm_lite.client.media.decoding import opened

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def forget():
    Path("/proc/self/clear_refs").write_text("5")

opened(Path(sys.argv[1]).read_bytes(), 10**9)  # its decoder is loaded
found = []
for name in sys.argv[2:]:
    data = Path(name).read_bytes()
    forget()
    before = most()
    opened(data, 10**9)
    found.append(most() - before)
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", FILES)
def test_pixels_count_by_the_memory_that_they_take(tmp_path: Path, name: str) -> None:
    """As much as decoding really takes, with and without rotation."""
    how, pixel_bytes = FILES[name]
    (small := tmp_path / "small").write_bytes(file_of(how, (8, 8)))
    files = [tmp_path / "upright"]
    files[0].write_bytes(file_of(how, SIZE))
    if how[0] in ("PNG", "JPEG", "WEBP"):
        files.append(tmp_path / "turned")
        files[1].write_bytes(file_of(how, SIZE, turned=True))
    done = subprocess.run([sys.executable, "-c", DECODE, small, *files], capture_output=True, text=True, check=True)
    for file, taken, expected in zip(files, json.loads(done.stdout), (pixel_bytes, max(pixel_bytes, 8)), strict=False):
        header = header_of(file.read_bytes())
        assert header.pixel_bytes == expected
        assert taken <= header.counted * 4 * 1.35, f"{taken / header.num_pixels:.1f} bytes a pixel"


def test_images_that_need_too_much_are_refused_before_they_are_decoded() -> None:
    plain, double = file_of(("PNG", "RGB"), (500, 300)), file_of(("PNG", "RGBA"), (500, 300))
    assert opened(plain, 150_000).size == (500, 300)
    with pytest.raises(RequestError, match="the image has 150000 pixels; at most 149999 are decoded"):
        opened(plain, 149_999)
    assert opened(double, 300_000).size == (500, 300)
    with pytest.raises(
        RequestError,
        match="has 150000 pixels, of which each counts 2 times for the memory that it takes; at most 299999",
    ):
        opened(double, 299_999)


def test_common_photos_are_decoded_by_default() -> None:
    for how, size, turned in ((("JPEG", "RGB"), (6000, 4000), False), (("JPEG", "RGB"), (4032, 3024), True)):
        assert header_of(file_of(how, size, turned=turned)).counted <= MAX_PIXELS


def test_a_png_says_that_it_is_turned_behind_its_pixels() -> None:
    """Pillow would decode it to find out; it counts as if it were."""
    data = file_of(("PNG", "RGB"), (8, 8), turned=True)
    assert header_of(data).pixel_bytes == 8
    assert data.index(b"eXIf") < data.index(b"IDAT")
    chunk = data[data.index(b"eXIf") - 4 : data.index(b"IDAT") - 4]
    moved = data.replace(chunk, b"").replace(b"\x00\x00\x00\x00IEND", chunk + b"\x00\x00\x00\x00IEND")
    header = header_of(moved)
    assert header.pixel_bytes == 8
    assert tiles_of(moved, SETTINGS) == tiles_of(data, SETTINGS)


def test_colors_in_scans_of_their_own_are_seen() -> None:
    """A decoder keeps all of an image then, also where it is not progressive."""
    data = file_of(("JPEG", "RGB"), (64, 64))
    place = data.index(b"\xff\xda")
    assert header_of(data).pixel_bytes == 4
    one_color = data[: place + 4] + b"\x01" + data[place + 5 :]
    assert header_of(one_color).pixel_bytes > 4


def waits_for(fd: int) -> bool:
    """Whether a process waits for the lock of this file."""
    inode = f":{os.fstat(fd).st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_one_big_image_is_decoded_at_a_time() -> None:
    """Small images are decoded meanwhile."""
    pool, deadline_s = ImagePool(SETTINGS), time.monotonic() + scaled(60.0)
    big, small = file_of(("PNG", "1"), (3000, BIG_PIXELS // 3000 + 1)), as_file("PNG", "RGB", 60, 50, 1)
    with ThreadPoolExecutor(1) as threads:
        try:
            fcntl.lockf(pool._lock_fd, fcntl.LOCK_EX)  # as another process that decodes one
            asked = threads.submit(pool.made, GivenImage(big))
            while not waits_for(pool._lock_fd):
                assert not asked.done(), "it did not wait"
                assert time.monotonic() < deadline_s
            assert pool.made(GivenImage(small)) == tiles_of(small, SETTINGS)
            assert not asked.done()
            fcntl.lockf(pool._lock_fd, fcntl.LOCK_UN)
            assert asked.result(scaled(60.0)) == tiles_of(big, SETTINGS)
        finally:
            pool.close()
