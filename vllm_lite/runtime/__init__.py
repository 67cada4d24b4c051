"""Common needs of every process: logs, settings, child processes, this machine. No torch."""
