"""`vllm-lite doctor`: checks what is installed and what works on this machine.

Only the standard library is imported before a check runs, so that anything else that is broken becomes a line of the
report.
"""
