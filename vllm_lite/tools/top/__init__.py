"""`top`: a live view of a server's engines, in a terminal.

watched.py   follows /v1/live: the engines' states, and rates between two states
screen.py    draws them within a number of lines and columns
terminal.py  shows them until `q`, also while the server is unreachable
"""
