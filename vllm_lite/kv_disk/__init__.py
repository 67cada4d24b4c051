"""KV blocks and recurrent states in files: their format, the directory that engines share, its index and its quota."""
