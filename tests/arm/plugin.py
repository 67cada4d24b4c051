"""Plugin of pytest: all tests of a run use the kernels of an emulated process (remote.py)."""

import os

import pytest

from tests.arm.remote import Remote, missing
from vllm_lite.kernels.cpu import library

_reason = missing()
if _reason is not None:
    raise RuntimeError(_reason)
_remote = Remote(os.environ.setdefault("VLLM_LITE_GUEST_CPU", "max"))
pytest.MonkeyPatch().setattr(library, "library", lambda: _remote)
