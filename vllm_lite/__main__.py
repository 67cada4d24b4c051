"""`python -m vllm_lite`: the same as the `vllm-lite` command."""

import sys

from vllm_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
