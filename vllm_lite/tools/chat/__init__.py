"""The command line as a client of a server: any that speaks OpenAI's API, or one of its own. No torch.

api.py            one server: texts in, streams of pieces out; every way this fails as one sentence
own.py            a server of one's own on a private socket, which ends with its process
conversation.py   what was said, what was set; files of it
chat.py           turns and /commands, without a terminal
terminal.py       lines in, text out: history, Ctrl-C, pipes
batch_file.py     OpenAI's batch files: what is asked, what was answered already
batch.py          many requests at once, from such a file into such a file
"""
