"""Entries of the cache, and what gc did, for people: sizes and ages in words."""

from __future__ import annotations

from collections.abc import Sequence

from loadplan.cache.entries import Entry, GcReport

SHOWN_DIGITS = 12  # of a key; the first digits of one name its entry


def table(entries: Sequence[Entry], now_s: float) -> list[str]:
    """The entries for people: one a line, under a heading."""
    rows = [("key", "kind", "label", "size", "made", "used", "pins")]
    for entry in entries:
        kind = entry.info.get("kind", "?") if entry.is_complete else "incomplete"
        made, used = show_age(now_s - entry.created_s), show_age(now_s - entry.last_used_s)
        label = printable(entry.info.get("label", "-"))
        pins = printable(", ".join(entry.pins)) or "-"
        rows.append((entry.key[:SHOWN_DIGITS], printable(kind), label, show_size(entry.nbytes), made, used, pins))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {3, 4, 5}
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def gc_lines(report: GcReport, now_s: float) -> list[str]:
    """What gc did, for people."""
    would = "would be " if report.is_dry_run else ""
    lines = table(report.evicted, now_s) if report.evicted else []
    lines.append(
        f"{len(report.evicted)} entries, {report.blobs} blobs and {report.temporaries} temporary files {would}removed, "
        f"{show_size(report.nbytes)}; {report.kept} entries and {show_size(report.kept_nbytes)} {would}kept"
    )
    if report.over_nbytes:
        lines.append(f"{show_size(report.over_nbytes)} above the bound all the same: pinned, or used within the grace")
    return lines


def show_size(nbytes: int) -> str:
    """`1.5 GiB`, `12 KiB`, `7 B`: three digits at most, before rounding up to the next unit."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 10 or units[0] == "B" else f"{size:.1f} {units[0]}"


def show_age(seconds: float) -> str:
    """`5 s`, `3 min`, `2 h`, `9 d`; `now` for what is younger than a second, or dated ahead by another clock."""
    if seconds < 1:
        return "now"
    for unit, span in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * span:
            return f"{seconds // span:.0f} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str) -> str:
    """Without control characters: labels may come from a remote."""
    return "".join(mark if mark.isprintable() else "?" for mark in text)
