"""python -m vllm_lite.dynamo --model MODEL: serve a model as a worker of Dynamo, until SIGTERM."""

import sys

from vllm_lite.errors import ConfigError, VllmLiteError


def main() -> int:
    try:
        from dynamo.common.backend.run import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a worker of Dynamo needs the package {error.name}: pip install 'vllm-lite[dynamo]' "
            "--extra-index-url https://pypi.nvidia.com/"
        ) from error
    from vllm_lite.dynamo.engine import DynamoEngine

    run(DynamoEngine)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VllmLiteError as error:
        sys.exit(f"vllm_lite.dynamo: {error}")
