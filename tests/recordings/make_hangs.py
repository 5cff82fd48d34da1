"""Recordings of real runs that hang or end badly, one of each kind, and the alerts while they did.

    python -m tests.recordings.make_hangs              # record all of them anew
    python -m tests.recordings.make_hangs sleep save   # only these

Each is watched as a viewer would, for some time beyond the moment that a rank is named. One that does not name the
right rank, or gives other alerts when it is read again, is not kept. Files are as in `make.py`; the alerts, by
kind, are in `reported.json`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from ddpwatch import wire
from ddpwatch.sources.frames import Frame
from tests.builders.hanging_job import Watched
from tests.builders.zygote import Zygote
from tests.recordings.make import HANGS, REPORTED, anonymous, read, reported_in, write

KINDS = ("sleep", "stop", "kill", "raise", "mismatch", "skip", "abort", "data", "save", "side group", "lock")
WORLD = 3
LONGER_NS = 3_000_000_000
"""Time in ns that is recorded after a rank was named: stacks and secondary failures come a little later."""
MAX_BYTES = 60_000


def record(zygote: Zygote, kind: str, guilty: int) -> list[Frame]:
    """The frames of one run, without a trace of this machine."""
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        os.environ["DDPWATCH_RUN_DIR"] = f"{folder}/run"
        with (
            zygote.family({"DDPWATCH_RUN_DIR": f"{folder}/run"}) as start,
            Watched(start, Path(folder), kind, WORLD, guilty) as job,
        ):
            job.hang()
            job.until(job.named)
            until_ns = job.follower.monitor.state.now_ns + LONGER_NS
            job.until(lambda: job.follower.monitor.state.now_ns > until_ns)
            frames = [item for item, _, _ in job.items if isinstance(item, Frame)]
            reported = sorted({(finding.rule, finding.ranks) for finding in job.named()})
    if {ranks for _, ranks in reported} != {(guilty,)}:
        raise SystemExit(f"{kind}: not rank {guilty} was named, but {reported}; once more, please")
    # A last one, which says nothing: the time when it was last looked.
    first_ns = frames[0].received_ns
    frames = [anonymous(frame, wire.decode(frame.payload)) for frame in frames]
    frames.append(Frame(b"", b"", until_ns))
    return [frame._replace(received_ns=frame.received_ns - first_ns) for frame in frames]


def main() -> None:
    """Write the files that were asked for."""
    reported = json.loads(REPORTED.read_text()) if REPORTED.exists() else {}
    HANGS.mkdir(exist_ok=True)
    zygote = Zygote()
    try:
        for kind in sys.argv[1:] or KINDS:
            path = HANGS / f"{kind.replace(' ', '-')}.msgpack.gz"
            guilty = 0 if kind == "save" else WORLD - 1
            write(path, record(zygote, kind, guilty), MAX_BYTES)
            reported[path.name.partition(".")[0]] = reported_in(read(path), WORLD)
            print(f"{path.name}: {path.stat().st_size} bytes, {reported_in(read(path), WORLD)}", flush=True)
            if {tuple(ranks) for _, ranks in reported_in(read(path), WORLD)} != {(guilty,)}:
                raise SystemExit("which is not what was reported at the time")
    finally:
        zygote.close()
    lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(reported[kind])}" for kind in sorted(reported))
    REPORTED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
