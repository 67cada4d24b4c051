"""Chats that are taken apart: what a client gets of content, reasoning and calls, streamed, whole and gone on with."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from tests.tokenizers_for_tests import KINDS
from tests.unit import resumable_stage
from tests.unit.resumable_stage import Stage, events_in, settle
from tests.unit.test_server_response import FakeSession
from vllm_lite.client.sample import Cursor
from vllm_lite.client.stream import StreamFactory
from vllm_lite.client.text.response.pieces import Piece
from vllm_lite.client.text.tokenizer import Tokenizer
from vllm_lite.protocol.api import Finished, TokenLogprobs, Tokens, Welcome
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.structured import Thinking
from vllm_lite.server.calls.call import Call, CallContext, MAX_STYLE_BYTES
from vllm_lite.server.calls.place import Shown
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage
from vllm_lite.server.openai.chunks import AnswerStyle
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.logprobs import Spelling
from vllm_lite.server.openai.parsed import Writers
from vllm_lite.server.openai.parsing import CallIds, Parsing, _ThinkingCount, pieces
