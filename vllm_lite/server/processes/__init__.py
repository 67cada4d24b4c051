"""The processes of `vllm-lite serve`.

serve.py         the command: sockets, the engine, then the first API server
http_server.py   one API server, in any process
api_servers.py   starts, watches and restarts the other API servers
scoreboard.py    memory that all API servers share: signs of life, numbers of requests
serve_models.py  `serve --models`: the router
child_server.py  `serve` as a child of the process that uses it
"""
