"""The block manager: which KV blocks each sequence holds, what is cached, what moves between the tiers."""
