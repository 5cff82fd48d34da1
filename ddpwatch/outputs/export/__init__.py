"""`ddpwatch export`: a recording as JSON, CSV, a Chrome trace, or values for experiment loggers.

Read `step_range` (one pass over the recording), then the module of the format.
"""
