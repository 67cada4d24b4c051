"""The router: several models behind one address, each an own `serve` that is loaded when it is asked for.

config.py      settings of the router itself
catalog.py     the models that may be asked for, from a file, a folder or the hub's cache
placement.py   the decision which models are loaded, sleep or end: a function without side effects
fleet.py       the models at run time: requests wait for theirs, decisions are carried out
member.py      a model of the fleet: its processes, counts, and who waits for it
backend.py     one model's processes: started, asleep, awake, ended, measured
child.py       the entry point of such a process: `serve` on a socket in a private folder
memory.py      bytes in memory of a tree of processes
upstream.py    an HTTP request to a backend
forward.py     a client's request, sent on to the backend of its model
known.py       descriptions of models that need not be loaded for them
routes.py      the router's own routes: models, health, metrics
watch.py       /v1/live: the models' state, and what their engines do
ollama.py      Ollama's routes that manage models
exposition.py  /metrics of all backends as one text
app.py         the application
"""
