"""`ddpwatch export`: a recording as JSON, CSV, a Chrome trace, or values for experiment loggers.

Read `reader` (one pass over the recording), then the module of the format.
"""
