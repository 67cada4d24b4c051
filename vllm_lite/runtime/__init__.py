"""What every process needs around its own work: logs, settings, child processes, this machine. No torch."""
