"""What leaves ddpwatch other than on a screen: alert sinks, Prometheus, reports, exports, comparisons, the relay.

Here: one module or package an output. Not here: the figures in them (`core`) and reading recordings (`recording`).
"""
