"""Engines as a client reaches them: sessions over one connection or several, their launch, supervision and routing.

session.py          one engine, and those that take its place
any_session.py      the interface of sessions
link.py             the connection that a session has now
connection.py       the handshake
asking.py           questions beside requests
answers.py          pending answers
joined_answers.py   answers of several engines as one
feature.py          the seam for what engines do beside requests: adapters, recovery of workers
operations.py       pause, sleep, adapters, weights
data_parallel.py    several engines as one session
routing.py          choice of an engine by prefix and load
cached_blocks.py    the prefixes that engines have cached
launch.py           the start of an engine
launch_engines.py   the start of several
supervisor.py       the replacement of an engine that died
engine_probe.py     the supervisor's connection
instances.py        engines and servers of this user
"""
