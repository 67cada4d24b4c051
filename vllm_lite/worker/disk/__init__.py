"""The worker's half of the disk tier: threads that move blocks and states between the pools and files."""
