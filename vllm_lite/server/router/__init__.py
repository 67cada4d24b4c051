"""The router: several models behind one address, each with a `serve` of its own that is loaded on demand.

config.py      settings of the router
catalog.py     the models that can be requested, from a file, a folder or the hub's cache
placement.py   decides which models are loaded, put to sleep or stopped: a function without side effects
fleet.py       the models at run time: lets requests wait for their model, and carries out decisions
member.py      a model of the fleet: its processes, counts, and waiting requests
backend.py     one model's processes: starts, stops, wakes them and puts them to sleep
memory.py      memory of a process tree
upstream.py    an HTTP request to a backend
forward.py     forwards a client's request to the backend of its model
known.py       descriptions of models, from their files
routes.py      the router's own routes: models, health, metrics
watch.py       /v1/live: the state of the models and of their engines
ollama.py      Ollama's routes that manage models
exposition.py  /metrics of all backends as one text
app.py         the application
"""
