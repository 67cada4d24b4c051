"""What is installed and what works on this machine. Only the standard library is imported before a check runs: whatever
else is broken is then a line of the report."""
