"""`chat` and `complete`: clients of a server that speaks OpenAI's API, or of a private one. No torch.

remote_server.py   a server: prompts in, streams of pieces out; every failure as one sentence
private_server.py  a server on a private socket, which ends with the command that started it
conversation.py    questions, answers and settings of a chat; files of them
chat.py            the loop of a chat: messages and /commands, without a terminal
terminal.py        lines in, text out: history, Ctrl-C, pipes
word_wrap.py       lines of a terminal end between words
"""
