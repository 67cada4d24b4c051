"""`vllm-lite quantize`: writes a quantized checkpoint of a dense one.

checkpoint.py  goes through the files, and writes the new folder
schemes.py     what becomes of one matrix, and what config.json says of it
"""
