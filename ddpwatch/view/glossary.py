"""Glossary of the help screen: every number and glyph on the screens, in one sentence each."""

from __future__ import annotations

from typing import Final

GLOSSARY: Final[dict[str, dict[str, str]]] = {
    "the job": {
        "step": "From the end of one optimizer.step() to the end of the next: shorter is faster.",
        "median": "The middle value of the last 50 steps that all ranks have finished: one odd step moves nothing.",
        "p99": "99 of 100 steps are shorter: far above the median means that some steps stumble.",
        "throughput": "Samples that all ranks together train on in a second: the number to compare settings by.",
        "a rank": "Throughput of one rank: what one GPU or process gets done in a second.",
        "own work": "Part of the step in which the ranks do their own work; the rest is all-reduce.",
        "00:42:17": "How long the job has been running, by the ranks' own clocks.",
        "batch": "Effective batch: samples of all ranks in one step, gradient accumulation included.",
        "scaling, % of 8×": (
            "Only with --baseline, throughput against as many times that of the one process in the recording: 100% "
            "loses nothing."
        ),
    },
    "all-reduce": {
        "all-reduce share": (
            "Part of the step in which ranks stand in communication and compute nothing: above 10% it is worth a "
            "look, and the split says where to look."
        ),
        "sync": "A rank's time in communication that it could not hide behind computing: wire and waiting together.",
        "wire": (
            "What the network itself takes, seen from the last rank to arrive: if it is much, send fewer bytes or find "
            "a faster network."
        ),
        "waiting": "Time in which ranks wait for slower ones: much of it means that a rank is slow, not the network.",
        "overlap": (
            "Part of the gradient all-reduce that is hidden behind the backward pass: 100% costs nothing; it needs "
            "bucket timing."
        ),
        "bucket": "Gradients that DDP sends together: sent as soon as they are ready, so the last one shows most.",
        "bus bandwidth": (
            "Bytes per second as nccl-tests counts them, 2(n-1)/n x bytes / time: compare it with what the link can do."
        ),
    },
    "a rank": {
        "self": (
            "The rank's own work, the step without sync: step times are equal on all ranks, and only this shows the "
            "slow one."
        ),
        "wait": "How long the rank waits for others in each step: the one that waits least is the one they wait for.",
        "imposed cost": "Part of the job's time that would be saved, were this rank as fast as the next-slowest.",
        "data": "Time blocked in the DataLoader: near zero when workers keep up.",
        "forward, fwd": "Time in the forward pass: longer on one rank means larger inputs or a slower device.",
        "backward, bwd": "Time in the backward pass without waiting for the all-reduce: about twice the forward pass.",
        "optimizer, opt": "Time in optimizer.step(): the same on every rank unless one does extra work there.",
        "other": "What is left of the step: loss, clipping, logging, evaluation, checkpoints, Python.",
        "CPU %": "CPU use of the rank's process: 100% is one core, more means several threads.",
        "RSS": "Memory of the rank's process on its host, not on the GPU: growing without end means a leak.",
        "of ranks'": "Part that a rank has of the RSS of all ranks on its host: not of the host's memory.",
        "lost": "Messages of a rank that did not arrive here: the training is unharmed, the figures have gaps.",
        "dropped": "Records that the agent had to overwrite before it could send them: its thread got no CPU.",
        "ddpwatch's cost": "Time of ddpwatch's hooks in a step, and CPU of its own thread: what watching takes.",
    },
    "GPUs": {
        "GPU %, util": (
            "Part of the last second in which a kernel ran on the GPU: a rank that waits in an NCCL all-reduce is at "
            "100% as well, so look at what of it is waiting."
        ),
        "GPU % with ░": "Much of the utilisation is waiting for slower ranks in the all-reduce: not work.",
        "GPU mem, memory": "Memory of the GPU in use, of all processes: above 95% and growing it will run out.",
        "▆ ▄ ▂ of memory": "Reserved by torch, the rest of the rank's process, and other processes on the GPU.",
        "tensors": "What torch's tensors take of the memory that it has reserved: far less means fragmentation.",
        "all GPUs": "With many GPUs one sign each, host by host: how much of the time it works for the training.",
        "temp": "Temperature of the GPU: what matters is whether its clocks are held down for it.",
        "power": "What the GPU draws now, of what it may draw.",
        "SM MHz": "Clock of the GPU's cores, of the highest it has: lower on one GPU makes its rank slow.",
        "▲ thermal": "The clocks are held down by heat or by the hardware: a reason to look at the host.",
        "· power cap": "The clocks are held down by the power limit: normal at full load.",
        "✖ Xid 79": "An error that the GPU's driver has told, by its number: the rank's page says what it means.",
        "✖ ECC 2": "Errors of the GPU's memory that could not be corrected, since its driver was loaded.",
        "history": "Utilisation of the last readings, one a second, newest at the right: the top is 100%.",
    },
    "states and marks": {
        "ok": "The rank is heard four times a second and trains.",
        "▲ slow …": "A straggler: the phase in which it is slow, and what part of the job's time that costs.",
        "▲ 12 s in …": (
            "The rank has been in one phase for so long: in sync it waits, anywhere else it holds others up."
        ),
        "‖ …": "The script has said that it pauses (agent.pause): no alarm is raised for it.",
        "▲ silent": "Nothing was heard for two seconds: frozen, host gone, or the network to here has failed.",
        "✖ lost": "The process has ended without a word: killed, most likely.",
        "✖ failed": "An exception has ended the rank: its page shows the text.",
        "✖ missing": "The rank belongs to the job and was never heard: does every rank call install?",
        "■ ended": "The rank has said goodbye: all is well.",
        "· ▲ ✖": "How bad an alert is: good to know, a warning, critical.",
        "–": "Not known, or unproven: ddpwatch shows no number that it cannot stand for.",
        "unproven": "It looks like that, but ranks or steps are missing or it is inside the noise: nothing is claimed.",
        "SIMULATED": "Made-up data of a demo: no training runs behind it.",
        "REPLAY": "A recording: what is shown is of then, and its times are those of then.",
        "◉ REC": "What comes is recorded; ▲ REC: something could not be, and the last line says why.",
        "● LIVE": "At least one rank is heard: what is shown is of now.",
        "▲ SILENT": "No rank is heard any more and none has said goodbye: the network, or all of them have stopped.",
        "■ ENDED": "All ranks have gone: what is shown is how they left.",
        "‖ PAUSED": "The screen stands still; the training goes on and nothing of it is lost meanwhile.",
        "‖ STEP 1,240": "The screen looks back at that step: figures, charts and alerts are as they were then.",
    },
    "charts": {
        "heat map": (
            "One row a rank, one column a step or several: the darker, the more of the step its own work took beyond "
            "the middle rank's; with many ranks a row stands for several and shows the worst."
        ),
        "sparkline": "The last steps from left to right, newest at the right: a higher block is a larger number.",
        "│ in a bar": "On a rank's page: where the bar of the others ends; what is beyond it is extra.",
    },
}
"""Groups of terms, in the order of the screens."""
