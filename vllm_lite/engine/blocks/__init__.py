"""The block manager: KV blocks of each sequence, the prefix cache, and moves between the tiers."""
