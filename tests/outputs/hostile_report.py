"""Recordings in which every text field contains markup, and the data of a report read from a recording."""

from __future__ import annotations

from contextlib import closing

from ddpwatch import wire
from ddpwatch.outputs.report.data import gather
from ddpwatch.recording.reader import Recording
from tests.builders.fake_rank import make_beat, make_gpu, make_gpus, make_hello, make_stack, make_step
from tests.builders.recordings import frame, straggler

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><b>x</b><!-- \x1b[31m\x00\u202e\u2028</script>"
"""Fits into a name on the wire, but is shortened when sanitized, so each piece also comes alone."""
PIECES = (
    HOSTILE[:79],
    "<img src=x onerror=alert(2)>",
    "\"' onload=alert(3) x='",
    "</script><svg/onload=alert(4)>",
    "%{y}<b>x</b><a href='javascript:alert(5)'>",
)


def read(path, number=-1):
    with closing(Recording(path)) as recorded:
        return gather(recorded, recorded.attempts[number])


def hostile_frames(*texts):
    """Frames of one rank for each text, with the text in every field that can contain it."""
    reported, world = [], len(texts)
    for rank, text in enumerate(texts):
        hello = make_hello(
            rank, 1, world_size=world, agent_version=text, run_name=text, host=text + str(rank), backend=text,
            device=text, model=text, kind=text, comm=text, clock=text, python=text, torch=text, command=text,
            ddp={text: text}, environment={text: text}, run_id=text, mono_ns=1,
        )  # fmt: skip
        group = wire.Group(text, 2, 1, op=text, shape=text, members=text, error=text)
        gpu = make_gpu(device=text, name=text, uuid=text, throttle=[text, "hw_slowdown"], absent={text: text})
        steps = [make_step(index, backwards=1, values={text: 1.0}) for index in range(40)]
        reported += [
            hello,
            make_beat(rank, 2, mono_ns=2, step=40, pause=text, groups=[group], steps=steps),
            make_gpus(rank, [gpu], seq=3, mono_ns=2),
            wire.Note(rank=rank, seq=4, kind=text, text=text, step=1, mono_ns=2),
            wire.Loader(rank=rank, seq=5, step=0, epoch=0, sampler=text, distributed=True),
            wire.Checksum(rank=rank, seq=6, step=1, parameter=text, offset=0, crc=1),
            wire.Buckets(rank=rank, seq=6, step=39, buckets=[wire.Bucket(0, 10, 1, 5)]),
            make_stack(rank, (text, text, 1), seq=6),
            wire.LogLines(rank=0, seq=0, source=text, lines=[wire.LogLine(1, text)]),
            wire.Bye(rank=rank, seq=7, reason="failed", text=text, mono_ns=3),
        ]
    return [frame(message, (place + 1) * 10**8) for place, message in enumerate(reported)] + [
        frame(wire.Held(rank=0, seq=0, by=text), 10**10)
    ]


def hostile_alert(text):
    evidence = {text: text, "share_percent": 3.0}
    words = {"rule": text, "subject": text, "message": text, "advice": text, "detail": text, "phase": text}
    return straggler(0, since=5, evidence=evidence, pattern=text, **words)
