"""`vllm-lite doctor`: checks the installation and this machine.

Only the standard library is imported before a check runs, so that any broken package becomes a line of the report.
"""
