"""Serve a model over HTTP; without MODEL, the bundled demo model. Flags override VLLM_LITE_* variables, which override
the file of --config."""

import argparse
from pathlib import Path

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log, supervise
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.tools.cli import vllm_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    vllm_flags.add_settings(parser, RouterConfig, "folder, GGUF file, or hub id (org/model)")


def run(arguments: argparse.Namespace) -> int:
    log.moment("server", "python, command line")
    model = arguments.model if arguments.folder is None else arguments.folder
    last_name = (arguments.served_model_name or [""])[-1]
    if model is None and last_name and Path(last_name, "config.json").is_file():
        raise ConfigError(f"{last_name!r} was read as a name of --served-model-name; give MODEL before the flags")
    config = vllm_flags.load_settings(arguments, RouterConfig)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return 0
    if config.models is not None:
        supervise.end_early()
        if model is not None or config.model != RouterConfig().model:
            raise ConfigError(f"--models has the models to serve; take {config.model!r} out, or into their file")
        # Imported here, as a server of one model does not need it.
        from vllm_lite.server.processes.serve_models import serve_models

        return serve_models(config)
    from vllm_lite.server.processes.serve import serve

    return serve(config.of_one_model())
