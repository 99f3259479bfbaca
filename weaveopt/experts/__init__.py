"""`DistributedConfig(ep_size=N, ep_implementation="weave")`: transformers' expert parallelism as one operation a layer.

Importing weaveopt is enough, before or after transformers and before the model is built. Nothing here imports
transformers until the program does.
"""
