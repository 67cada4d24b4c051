"""Routes that vLLM has beside those of OpenAI.

routes.py       /invocations, several chats at once, rendered requests, requests that end
rendered.py     converts chats and completions to bodies of /inference/v1/generate
bodies.py       the bodies of /derender
derender.py     converts answers of /inference/v1/generate to those of chats and completions
adapters.py     /v1/load_lora_adapter and /v1/unload_lora_adapter
operations.py   pause, sleep and new weights
information.py  /server_info and /tokenizer_info
"""
