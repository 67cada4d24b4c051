"""The processes of `vllm-lite serve`: the server in front of an engine, other API servers, private servers."""
