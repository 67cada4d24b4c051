"""OpenAI's /v1/responses: answers that are kept, gone on with, and streamed again from any event.

bodies.py        what a request may say
client_tools.py  tools that the client runs: as functions of the model, and their calls as items
call_outputs.py  outputs of such calls: checked, and as texts
items.py         input items, as they are kept and listed
toolbox.py       the tools of one request: what becomes of each type
earlier.py       what a request takes of the responses before it, found once and counted
history.py       items as the messages of a chat
asking.py        a request as a chat, and as the response object that answers repeat
called.py        one call while its arguments arrive
output.py        what is generated, as output items and as the events of a stream
event_log.py     the events of one stream, which any number of connections read from any place
runs.py          responses that run, with or without a reader
store.py         responses that have ended, in memory or in a SQLite file
routes.py        the routes
"""
