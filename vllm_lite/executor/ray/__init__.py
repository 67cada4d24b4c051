"""Workers on the hosts of a Ray cluster: the same processes as on one host, started by an actor for each rank.

executor.py   RayExecutor: keys, and the address at which workers report
ranks.py      the actors of one group from the engine's side: placed, started, watched, ended
placement.py  which resources a rank takes, whether one node has them all, what is missing
actor.py      RankActor: starts the worker process of its rank on the node where it is
"""
