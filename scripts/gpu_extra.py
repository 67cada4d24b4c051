"""`make venv` asks: which extra of this package has the CuPy for this machine's GPU? Prints nothing without a GPU.

It says why a GPU cannot be used, because the installation itself would look fine.
"""

import sys

from vllm_lite.runtime import machine


def main() -> int:
    if not machine.has_driver():
        return 0
    extra = machine.cuda_extra()
    if extra is not None:
        print(extra)
        return 0
    print(
        f"WARNING: this machine has an NVIDIA driver, but torch {machine.version('torch')} is built without CUDA: "
        "workers will run on the CPU. Unset PIP_EXTRA_INDEX_URL and call: make -B venv",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
