"""The processes of `vllm-lite serve`.

serve.py         the command: sockets, the engine, then the first API server
http_server.py   one API server, of any process
api_servers.py   the other API servers: started, watched, restarted
scoreboard.py    memory that all API servers share: who is alive, with how many requests
serve_models.py  `serve --models`: the router
child_server.py  `serve` as a child of the process that uses it
"""
