"""`vllm-lite quantize`: writes a quantized checkpoint of a dense one.

checkpoint.py  reads the files, and writes the new folder
schemes.py     quantization of a matrix, and its entries in config.json
"""
