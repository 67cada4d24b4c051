"""Workers on the hosts of a Ray cluster: the same processes as on one host, started by one actor per rank.

executor.py   RayExecutor: keys, and the address to which workers connect
ranks.py      RemoteRanks: places, starts, watches and ends the actors of one group
placement.py  resources of a rank, and their placement on nodes
actor.py      RankActor: starts the worker process of its rank on the actor's node
"""
