"""`python -m vllm_lite`: the same as the `vllm-lite` command."""

import sys

from vllm_lite.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
