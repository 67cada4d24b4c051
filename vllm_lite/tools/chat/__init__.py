"""`chat` and `complete`: clients of a server with OpenAI's API, or of a private server. No torch.

remote_server.py   a server: prompts in, streams of pieces out; errors are one sentence each
private_server.py  a server on a private socket, which ends with the command that started it
conversation.py    questions, answers and settings of a chat; saved files
chat.py            the loop of a chat: messages and /commands, independent of a terminal
terminal.py        input and output: history, Ctrl-C, pipes
word_wrap.py       wraps lines of a terminal between words
"""
