"""The engine's hand on its workers: base.py the interface, multiproc.py worker processes on this host."""
