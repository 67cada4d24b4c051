"""The scheduler and the block manager: every decision is made here, no byte of KV is moved. No torch, no tokenizer."""
