"""What is wrong with a recording, in words."""

from __future__ import annotations

from ddpwatch.core.numbers import count, percent, plural


def damage_text(parts: int, missing: int, frames: int, cut: float) -> str:
    """So many parts that could not be read, frames that are missing beside those that are there, and the part of the
    file that is cut off.
    """
    words = [f"{plural(parts, 'part')} could not be read"]
    if missing:
        words.append(
            f"{count(missing)} of {plural(missing + frames, 'frame')} {'is' if missing == 1 else 'are'} missing"
        )
    if cut:
        words.append(f"the last {percent(cut) if cut >= 0.01 else 'bit'} of the file is cut off")
    return ", ".join(words)
