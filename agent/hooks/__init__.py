"""Hooks into torch that stamp the phases of a step: forward, backward, optimizer, DataLoader and communication.

Here: what runs on the training thread, under `fail_open`. Not here: the clock (`agent.clock`, `agent.cuda_clock`) and
the record that the stamps go into (`agent.step_recorder`). Begin with `forward`.
"""
