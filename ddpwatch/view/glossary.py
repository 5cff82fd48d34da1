"""Glossary of the help screen: every number and glyph on the screens, in one sentence each."""

from __future__ import annotations

from typing import Final

GLOSSARY: Final[dict[str, dict[str, str]]] = {
    "the job": {
        "step": "From the end of one optimizer.step() to the end of the next: shorter is faster.",
        "median": "Median of the last 50 steps that all ranks have finished: a single slow step does not change it.",
        "p99": "99% of the steps are shorter: far above the median means that some steps are much slower.",
        "throughput": "Samples per second of all ranks together: the number to compare settings by.",
        "/rank": "Throughput of one rank: samples per second of one GPU or process.",
        "own work": "Fraction of the step in which ranks compute or load data; the rest is exposed all-reduce.",
        "00:42:17": "How long the job has been running, by the ranks' clocks.",
        "batch": "Effective batch size: samples of all ranks in one step, including gradient accumulation.",
        "scaling, % of 8×": (
            "With --baseline only: throughput relative to 8 times that of the single process in the baseline "
            "recording; 100% is linear scaling."
        ),
    },
    "all-reduce": {
        "all-reduce share": (
            "Exposed communication: the fraction of the step in which ranks communicate and do not compute: above 10% "
            "it is worth a look, and the split into wire and waiting shows where."
        ),
        "sync": "Exposed communication of one rank, not hidden behind computation: wire plus waiting.",
        "wire": (
            "Time of the transfer itself, measured on the last rank to arrive: if it is large, send fewer bytes or use "
            "a faster network."
        ),
        "waiting": (
            "Time in which ranks wait for slower ones, as the mean over ranks (one of two waiting 52% of the time = "
            "26%): if it is large, a rank is slow, not the network."
        ),
        "sync point": (
            "A place in a step where ranks wait for each other: DDP's own, FSDP's, and every collective that the "
            "script calls; each is split into wire and waiting, and named by its line."
        ),
        "overlap": (
            "Fraction of the gradient all-reduce that is hidden behind backward: at 100% it costs nothing; needs "
            "bucket timing."
        ),
        "bucket": "Gradients that DDP reduces together as soon as they are ready: the last bucket is hidden least.",
        "bus bandwidth": (
            "Bytes per second as nccl-tests defines busbw, 2(n-1)/n x bytes / time: compare it with the link's speed."
        ),
    },
    "a rank": {
        "self": (
            "The rank's own work, the step without sync: step times are equal on all ranks, and only this shows the "
            "slow one."
        ),
        "wait": "How long the rank waits for others per step: the rank that waits least is the one they wait for.",
        "straggler cost": "Fraction of the job's time saved if this rank were as fast as the next-slowest.",
        "data": "Time blocked in the DataLoader: near zero while its workers keep up.",
        "forward, fwd": "Time in the forward pass: longer on one rank means larger inputs or a slower device.",
        "backward, bwd": "Time in the backward pass without exposed all-reduce: about twice the forward pass.",
        "optimizer, opt": "Time in optimizer.step(): the same on every rank unless one does extra work there.",
        "other": "The rest of the step: loss, clipping, logging, evaluation, checkpoints, Python.",
        "pauses": (
            "Parts of a step with a name: garbage collection in any phase, checkpoint saves and evaluation in other; "
            "while one rank pauses alone, all others wait."
        ),
        "CPU %": "CPU utilization of the rank's process: 100% is one core, more means several threads.",
        "RSS": "Resident host memory of the rank's process, not GPU memory: unbounded growth means a leak.",
        "of ranks'": "The rank's fraction of the RSS of all ranks on its host, not of the host's memory.",
        "lost": "Messages of a rank that did not arrive here: training is not affected, but figures have gaps.",
        "dropped": "Records that the agent overwrote before it could send them: its thread got no CPU time.",
        "ddpwatch itself": "Overhead: time of ddpwatch's hooks per step, and CPU time of its own thread.",
    },
    "GPUs": {
        "GPU %, util": (
            "GPU utilization: fraction of the last second in which a kernel ran; a rank that waits in an NCCL "
            "all-reduce also shows 100%, so look at how much of it is waiting."
        ),
        "GPU % with ░": "Much of the GPU utilization is waiting for slower ranks in the all-reduce.",
        "GPU mem, memory": "GPU memory in use by all processes: above 95% and growing, it will run out.",
        "▆ ▄ ▂ of memory": "Reserved by torch, the rest of the rank's process, and other processes on the GPU.",
        "tensors": "Memory that torch has allocated to tensors: far less than it has reserved means fragmentation.",
        "all GPUs": "With many GPUs, one glyph each, grouped by host: utilization without waiting.",
        "temp": "Temperature of the GPU: it matters if the GPU is throttled because of it.",
        "power": "Power draw and power limit of the GPU.",
        "SM MHz": "SM clock and its maximum: a lower clock on one GPU makes its rank slow.",
        "▲ thermal": "The clocks are throttled by heat or by the hardware: check the host's cooling and power.",
        "· power cap": "The clocks are limited by the power cap: normal at full load.",
        "✖ Xid 79": "Xid error that the NVIDIA driver has reported: the rank's page shows its meaning.",
        "✖ ECC 2": "Uncorrected ECC memory errors since the driver was loaded.",
        "history": "GPU utilization of the last readings, one per second, newest at the right: the top is 100%.",
    },
    "states and marks": {
        "ok": "The rank trains and sends four heartbeats per second.",
        "▲ slow …": "A straggler: the phase in which it is slow, and the fraction of the job's time that this costs.",
        "▲ 12 s in …": "Time that the rank has been in one phase: in sync it waits; in any other, others wait for it.",
        "✖ not joined": "The others wait for this rank in a collective; the phase that it is in instead.",
        "✖ mismatch": "The rank is in another collective than the others, or in one of another size.",
        "‖ …": "The script has announced a pause (agent.pause): no hang is reported during it.",
        "▲ no heartbeat": "No message for two seconds: process stopped, host down, or network to here broken.",
        "✖ lost": "The process has exited without reporting it: most likely it was killed.",
        "✖ failed": "The rank has exited with an exception: its page shows the text.",
        "✖ missing": "The rank belongs to the job but has sent nothing: does every rank call install()?",
        "■ exited": "The rank has exited cleanly.",
        "· ▲ ✖": "Severity of an alert: information, warning, critical.",
        "–": "Unknown or inconclusive: ddpwatch shows no number that it cannot support.",
        "inconclusive": "Ranks or steps are missing, or the difference is within noise: no claim is made.",
        "SIMULATED": "Synthetic data of a demo: no training is running.",
        "REPLAY": "A recording: everything is shown as of the recorded time.",
        "◉ REC": "The run is being recorded; ▲ REC: something could not be recorded, the last line shows why.",
        "● LIVE": "At least one rank sends heartbeats: the screen is current.",
        "▲ NO HEARTBEAT": "No rank sends heartbeats and none has exited: the network is broken, or all are stopped.",
        "■ ENDED": "All ranks have exited: the screen shows their last state.",
        "‖ PAUSED": "The screen is frozen; training continues, and no data is lost meanwhile.",
        "‖ STEP 1,240": "The screen shows a past step: figures, charts and alerts as they were then.",
    },
    "charts": {
        "heat map": (
            "One row per rank, one column per step or group of steps: the darker, the more time its own work took "
            "beyond the median rank's; with many ranks, a row shows the worst of several."
        ),
        "sparkline": "The last steps from left to right, newest at the right: a higher block is a larger number.",
        "│ in a bar": "On a rank's page: where the bar of the others ends; the part beyond it is extra time.",
    },
}
"""Groups of terms, in the order of the screens."""
