"""Why a run is slow, hangs or ended: which rank, which phase, root cause and secondary failures.

Here: conclusions that rules and outputs share. Not here: when to alert (`detectors`). Read `straggler_stats` and
`slow_episode` for slow ranks, `arrivals` and `mismatch` for hangs, `exits` and `outcome` for how a run ended.
"""
