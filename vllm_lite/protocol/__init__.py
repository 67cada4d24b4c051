"""The wire: every message that crosses a process boundary, as frozen msgspec structs. Imports msgspec only.

params.py   sampling parameters
structured.py  constraints on the form of an output
pooling.py  pooling parameters
spans.py    media in prompts, and their positions
encoder.py  media as the encoder reads them, and the entries of a step that compute and move them
api.py      client <-> engine
adapters.py  client <-> engine: loading and unloading LoRA adapters
external.py  client <-> engine: requests by the ids that users know
view.py     client <-> engine: a view of the engine's present state
stats.py    engine -> client: counters and measurements
operations.py  client -> engine: pause, sleep, weight updates, profiles
step.py     engine -> worker -> engine, once per step
control.py  engine <-> worker, outside the step: start, heartbeat, stop
transfers.py  engine <-> worker: blocks, states and media vectors between memory and disk
codec.py    one encoder and decoder per direction, with version and size limits
"""

import msgspec

PROTOCOL_VERSION = 28
"""Incremented with every change of a struct; Hello refuses any other version."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base class of every message, and of the structs inside messages."""
