"""Outputs that have to have a form: grammars of llguidance behind one small interface, for clients and workers. The
engine process imports nothing of it: to the engine a grammar is a text.
"""
