"""transformers: its expert parallelism as one operation a layer, what differs between versions, plans that it lacks.

`DistributedConfig(ep_size=N, ep_implementation="weave")`: importing weaveopt is enough, before or after transformers
and before the model is built. Nothing here imports transformers until the program does.
"""
