"""A worker of NVIDIA Dynamo: one engine behind its request plane. Needs the extra vllm-lite[dynamo].

mapping.py   Dynamo's requests to SamplingParams, the engine's outputs to Dynamo's chunks; does not import Dynamo
settings.py  the command line: the engine's settings and Dynamo's own
engine.py    DynamoEngine: the interface that a worker of Dynamo calls
__main__.py  python -m vllm_lite.dynamo --model MODEL
"""
