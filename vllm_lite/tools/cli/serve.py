"""Serve a model over HTTP; without MODEL, the bundled demo model. Flags override VLLM_LITE_* variables, which override
the file of --config."""

import argparse
from pathlib import Path

from vllm_lite.errors import ConfigError
from vllm_lite.runtime import log, supervise
from vllm_lite.runtime.settings import add_flags as add_config_flags
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.tools.cli import vllm_flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="folder, GGUF file, or hub id (org/model)")
    parser.add_argument("--config", metavar="FILE", help="YAML or TOML file with settings")
    parser.add_argument("--print-config", action="store_true", help="print all settings as such a file, and exit")
    add_config_flags(parser, RouterConfig)
    vllm_flags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    log.moment("server", "python, command line")
    flags = {name: getattr(arguments, name) for name in RouterConfig.__struct_fields__}
    flags["model"] = arguments.model if arguments.folder is None else arguments.folder
    last_name = (arguments.served_model_name or [""])[-1]
    if flags["model"] is None and last_name and Path(last_name, "config.json").is_file():
        raise ConfigError(f"{last_name!r} was read as a name of --served-model-name; give MODEL before the flags")
    config = RouterConfig.load(flags, file=arguments.config, of_vllm=arguments.of_vllm, notice=vllm_flags.say)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return 0
    if config.models is not None:
        supervise.end_early()
        if flags["model"] is not None or config.model != RouterConfig().model:
            raise ConfigError(f"--models has the models to serve; take {config.model!r} out, or into their file")
        # Imported here, as a server of one model does not need it.
        from vllm_lite.server.processes.serve_models import serve_models

        return serve_models(config)
    from vllm_lite.server.processes.serve import serve

    return serve(config.of_one_model())
