"""OpenAI's /v1/responses: answers that are stored, continued, and streamed again from any event.

bodies.py        the request body
client_tools.py  tools that the client runs: as functions of the model, and their calls as items
call_outputs.py  outputs of such calls: checked, and as texts
items.py         input items, as they are stored and listed
toolbox.py       the tools of one request, by type
earlier.py       earlier responses that a request refers to, read once and counted
history.py       converts items to the messages of a chat
asking.py        converts a request to a chat, and to the response object that answers repeat
called.py        one call while its arguments arrive
output.py        converts generated output to items and to the events of a stream
event_log.py     the events of one stream, which any number of connections read from any position
runs.py          running responses, with or without a reader
store.py         ended responses, in a SQLite database in memory or in a file
routes.py        the routes
"""
