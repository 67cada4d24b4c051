"""A client's connections to engines: sessions with one engine or several, launch, supervision and routing.

session.py          one engine, and those that replace it
any_session.py      the interface of sessions: requests, and queries beside them
link.py             a session's current connection
connection.py       the handshake
joined_answers.py   answers of several engines as one
feature.py          the interface of session features: pending answers, adapters, recovery of workers
operations.py       pause, sleep, weights
data_parallel.py    several engines as one session
routing.py          choice of an engine by prefix and load
cached_blocks.py    the prefixes that engines have cached
launch.py           the start of an engine
launch_engines.py   the start of several
supervisor.py       the replacement of an engine that died
orphans.py          children of a killed process
engine_probe.py     the supervisor's connection
instances.py        engines and servers of this user
"""
