"""Routes that vLLM has beside those of OpenAI.

routes.py       /invocations, several chats at once, rendered requests, requests that end
rendered.py     what a body asks for, as bodies of /inference/v1/generate
bodies.py       what /derender takes
derender.py     what others have generated, as answers of chats and completions
adapters.py     /v1/load_lora_adapter and /v1/unload_lora_adapter
operations.py   pause, sleep and other weights
information.py  /server_info and /tokenizer_info
"""
