"""Shared by all processes: logs, settings, child processes, facts about this machine. No torch."""
