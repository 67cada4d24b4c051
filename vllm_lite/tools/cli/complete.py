"""Continue a text: with the running server, or with MODEL on a private server. Without a text, all of stdin is
continued; on a terminal, line by line. Without MODEL, give the text as -q."""

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from vllm_lite.errors import ConfigError
from vllm_lite.tools.chat.terminal import Terminal
from vllm_lite.tools.cli import server_flags

if TYPE_CHECKING:  # imported only when needed, with httpx
    from vllm_lite.tools.chat.remote_server import RemoteServer

MAX_TOKENS = 256
"""The default; the API's own default of 16 ends before a sentence does."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="folder of a Hugging Face checkpoint, or 'demo'")
    parser.add_argument("text", metavar="TEXT", nargs="?", help="text to continue")
    server_flags.add_server_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="text to continue")
    server_flags.add_sampling_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.url is not None and arguments.folder is not None:
        raise ConfigError(f"the server at --url has its model; give the text as -q, got {arguments.folder!r}")
    if arguments.text is not None and arguments.quick is not None:
        raise ConfigError("the text is given twice; leave out -q or TEXT")
    given = arguments.text if arguments.quick is None else arguments.quick
    with server_flags.server(arguments, server_flags.private_config(arguments)) as remote:
        terminal = Terminal()
        mild = server_flags.mild_defaults(arguments, remote)
        if terminal.is_interactive and mild:
            terminal.note(f"{mild}.")
        if given is None and terminal.is_interactive:
            return _lines(arguments, remote, terminal)
        if given is None:
            given = sys.stdin.read().removesuffix("\n")  # added by a shell's echo
        _complete(arguments, remote, terminal, given)
        return 0


def _lines(arguments: argparse.Namespace, remote: "RemoteServer", terminal: Terminal) -> int:
    where = "" if arguments.folder else f" at {remote.address.shown}"
    terminal.note(f"{remote.model}{where}. Each line is continued; Ctrl-C stops that, Ctrl-D leaves.")
    while (line := terminal.read("> ")) is not None:
        if not line:
            continue
        with terminal.interruptible():
            try:
                _complete(arguments, remote, terminal, line)
            except KeyboardInterrupt:
                terminal.note("stopped")
    return 0


def _complete(arguments: argparse.Namespace, remote: "RemoteServer", terminal: Terminal, prompt: str) -> None:
    with closing(remote.complete(prompt, {"max_tokens": MAX_TOKENS, **server_flags.sampling(arguments)})) as pieces:
        for piece in pieces:
            if piece.text:
                terminal.write(piece.text)
    terminal.end()
