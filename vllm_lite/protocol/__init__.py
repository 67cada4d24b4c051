"""The wire: every message that crosses a process boundary, as frozen msgspec structs. Imports msgspec only.

params.py   what a user may ask of sampling
structured.py  the form that an output must have
pooling.py  what a user may ask of vectors and scores
spans.py    media in prompts, and where they lie
encoder.py  media as an encoder reads them, and what of them a step computes and moves
api.py      client <-> engine
adapters.py  client <-> engine: LoRA adapters that come and go
external.py  client <-> engine: requests by the ids under which users know them
view.py     client <-> engine: the engine as it is at a moment, for who watches it
stats.py    engine -> client: counts and measurements
operations.py  client -> engine: pause, sleep, other weights
step.py     engine -> worker -> engine, once per step
control.py  engine <-> worker, outside the step: start, heartbeat, stop
transfers.py  engine <-> worker: blocks, states and vectors of media between memory and the disk
codec.py    one encoder and decoder per direction, with version and size limits
"""

import msgspec

PROTOCOL_VERSION = 22
"""Raised by one with every change of a struct; Hello refuses any other version by name."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of every message, and of the structs that a message holds."""
