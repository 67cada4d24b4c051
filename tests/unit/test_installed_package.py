"""Tests take files of the package from where it is installed: for `make test-wheel` there is no package beside them."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OF_THE_TREE = ("test_layers", "test_shape", "test_docs", "test_words", "test_packaging")
"""Files that check the source tree, which `make test-wheel` leaves out."""
BESIDE = re.compile(
    r'(ROOT|parents\[\d\]) / "vllm_lite\b|\("vllm_lite/|^from tests\.unit\.test_layers import', re.MULTILINE
)


def test_no_test_reads_the_package_beside_it() -> None:
    files = [path for path in sorted(TESTS.rglob("*.py")) if path.stem not in (*OF_THE_TREE, Path(__file__).stem)]
    assert [path.name for path in files if BESIDE.search(path.read_text())] == []


def test_the_files_left_out_match_the_script() -> None:
    script = (TESTS.parent / ".ci" / "test-wheel").read_text()
    assert tuple(re.findall(r"tests/\w+/(\w+)\.py", script)) == OF_THE_TREE


@pytest.mark.parametrize(
    "code",
    [
        'ROOT / "vllm_lite" / "x"',
        'Path(__file__).parents[2] / "vllm_lite/a"',
        'load("vllm_lite/a")',
        "import re\nfrom tests.unit.test_layers import PACKAGE",
    ],
)
def test_a_path_beside_is_seen(code: str) -> None:
    assert BESIDE.search(code)
    assert not BESIDE.search('files("vllm_lite") / "x"; (tmp_path / "vllm_lite").mkdir()')
