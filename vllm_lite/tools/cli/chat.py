"""Chat with a model in the terminal: with the running server, or with MODEL on a private server. Lines from a pipe are
questions, too; then only the answers are printed."""

import argparse
from typing import TYPE_CHECKING

from vllm_lite.tools.chat.conversation import Conversation
from vllm_lite.tools.chat.terminal import Terminal
from vllm_lite.tools.cli import server_flags

if TYPE_CHECKING:  # imported only when needed, with httpx
    from vllm_lite.tools.chat.chat import Chat


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="MODEL", nargs="?", help="checkpoint's folder, GGUF file, hub id, or 'demo'")
    server_flags.add_server_flags(parser)
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, and exit")
    parser.add_argument("--system-prompt", metavar="TEXT")
    server_flags.add_sampling_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from vllm_lite.tools.chat.chat import Chat

    with server_flags.server(arguments, server_flags.private_config(arguments)) as remote:
        model, terminal, is_quick = remote.model, Terminal(), arguments.quick is not None
        mild = server_flags.mild_defaults(arguments, remote)
        conversation = Conversation(arguments.system_prompt, server_flags.sampling(arguments))
        chat = Chat(remote, terminal, conversation, can_retry=not is_quick)
        if is_quick:
            chat.ask(arguments.quick)
            return int(chat.failed)
        if terminal.is_interactive:
            where = "" if arguments.folder else f" at {remote.address.shown}"
            terminal.note(f"{model}{where}. /help lists commands; Ctrl-C stops an answer.")
            if mild:
                terminal.note(f"{mild}; /set changes that.")
        return _talk(chat, terminal)


def _talk(chat: "Chat", terminal: Terminal) -> int:
    """Chat until the end of input. On a terminal, Ctrl-C at the prompt clears the line, and twice quits."""
    num_interrupts = 0
    while True:
        try:
            line = terminal.read("... " if chat.in_message else "> ")
            num_interrupts = 0
            if line is None:
                chat.end()
                break
            if not chat.line(line):
                break
        except KeyboardInterrupt:
            num_interrupts += 1
            if not terminal.is_interactive:
                raise
            if num_interrupts > 1:
                terminal.note("")
                break
            cleared = chat.cancel_message()
            terminal.note("\n" + ("the message is cleared" if cleared else "Ctrl-C again, or Ctrl-D, leaves"))
    return int(chat.failed and not terminal.is_interactive)
