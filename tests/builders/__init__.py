"""Makers that several test folders and the benchmarks share: messages, recordings, processes, real and fake ranks.

A maker that one folder uses stands in that folder. No test file imports another.

- without processes: `fake_rank` (messages, ranks on real sockets), `synthetic_run` and what builds on it, `windows`,
  `recordings` (of synthetic frames), `kept_runs` (of frames that real ranks once sent)
- real processes: `zygote` forks those that have torch, `forked_cli` those that have the command line; `rank_pool` keeps
  gloo ranks for one scenario after another, `hanging_job` makes them hang
"""
