"""`top`: what a server's engines do, live, in a terminal.

watched.py   follows /v1/live: what an engine has, and what it did between two looks
screen.py    draws that within so many lines and columns
terminal.py  shows it until `q`, over times without a server
"""
