"""How the ranks of a model add up and exchange what they compute: shared memory, NCCL, gloo, or nothing at all"""
