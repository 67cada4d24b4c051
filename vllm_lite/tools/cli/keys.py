"""Create CURVE keys with which an engine and its clients authenticate each other over TCP: the engine's, if FOLDER has
none, and a pair for each CLIENT, which may connect from then on. To revoke a client's access, remove its file in
FOLDER/clients."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder for the engine's --curve-keys")
    parser.add_argument("clients", metavar="CLIENT", nargs="*", help="name of a client")


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.transport.keys import make_client_keys, make_engine_keys

    folder: Path = arguments.folder
    print(f"{folder}: {'keys of the engine made' if make_engine_keys(folder) else 'has the keys of an engine already'}")
    for name in arguments.clients:
        bundle = make_client_keys(folder, name)
        print(f"{bundle}: bring this folder to {name}, over a channel that nobody else can read, and remove it here")
    known = sorted(file.stem for file in (folder / "clients").glob("*.key"))
    print(f"may connect: {', '.join(known) or 'nobody yet; name clients behind the folder'}")
    return 0
