"""A worker of NVIDIA Dynamo: one engine behind its request plane. Needs the extra vllm-lite[dynamo].

mapping.py   what Dynamo asks for as SamplingParams, what the engine gives as Dynamo's chunks; imports nothing of it
settings.py  the command line: this engine's settings beside Dynamo's own
engine.py    DynamoEngine: the interface that a worker of Dynamo calls
__main__.py  python -m vllm_lite.dynamo --model MODEL
"""
