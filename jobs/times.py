"""Dates, times and durations as text in ISO 8601, over the whole range of Arrow's integers.

`datetime` ends with the year 9999 and at microseconds; where it suffices, the text is the same as its `isoformat`.
"""

import re
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_DAYS_OF_400_YEARS = 146_097  # after which the calendar repeats itself
_NS_PER_S = 10**9
_NS_PER_DAY = 86_400 * _NS_PER_S
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIXED_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")


def date_text(days: int) -> str:
    """Return a day, counted from 1970-01-01, as in `2026-01-02`, `+10000-01-01` or `-0001-12-31`."""
    cycles, day = divmod(days + _EPOCH_ORDINAL - 1, _DAYS_OF_400_YEARS)
    in_cycle = date.fromordinal(day + 1)
    year = in_cycle.year + 400 * cycles
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04d}-{in_cycle:%m-%d}"


def time_text(ns: int) -> str:
    """Return a time of day as in `12:30:00`, with six or nine digits of a second where it has any."""
    seconds, fraction = divmod(ns, _NS_PER_S)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    if not fraction:
        return text
    return f"{text}.{fraction:09d}" if fraction % 1000 else f"{text}.{fraction // 1000:06d}"


def timestamp_text(ns: int, zone: str | None) -> str:
    """Return a moment as in `2026-01-02T12:30:00+01:00`, without an offset where the column has no zone.

    In UTC where this machine does not know the zone, or not so far in time.
    """
    offset_s = None if zone is None else _offset_s(zone, ns // _NS_PER_S) or 0
    days, of_day = divmod(ns + (offset_s or 0) * _NS_PER_S, _NS_PER_DAY)
    return f"{date_text(days)}T{time_text(of_day)}{'' if offset_s is None else _offset_text(offset_s)}"


def duration_text(ns: int) -> str:
    """Return a length of time as in `P1DT2H3M4.5S` or `-PT5S`."""
    days, of_day = divmod(abs(ns), _NS_PER_DAY)
    parts = (f"{days}D" if days else "") + _clock_parts(of_day)
    return ("-" if ns < 0 else "") + (f"P{parts}" if parts else "PT0S")


def interval_text(months: int, days: int, ns: int) -> str:
    """Return months, days and a length of time, each with a sign of its own, as in `P1M-2DT3S`."""
    parts = (f"{months}M" if months else "") + (f"{days}D" if days else "") + _clock_parts(abs(ns), "-" * (ns < 0))
    return f"P{parts}" if parts else "PT0S"


def _clock_parts(ns: int, sign: str = "") -> str:
    seconds, fraction = divmod(ns, _NS_PER_S)
    digits = f".{fraction:09d}".rstrip("0") if fraction else ""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{sign}{hours}H" if hours else "", f"{sign}{minutes}M" if minutes else ""]
    parts.append(f"{sign}{seconds}{digits}S" if seconds or digits else "")
    return "T" + "".join(parts) if any(parts) else ""


def _offset_s(zone: str, epoch_s: int) -> int | None:
    """Return how far ahead of UTC a zone is at a moment; None when that is not known."""
    if fixed := _FIXED_OFFSET.fullmatch(zone):
        ahead = int(fixed[2]) * 3600 + int(fixed[3]) * 60
        return -ahead if fixed[1] == "-" else ahead
    known = _zone(zone)
    if known is None:
        return None
    try:
        offset = (_EPOCH + timedelta(seconds=epoch_s)).astimezone(known).utcoffset()
    except (OverflowError, ValueError):  # before the year 1 or after 9999
        return None
    return None if offset is None else int(offset.total_seconds())


@lru_cache(256)
def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown, no name of a zone, or a folder of zones
        return None


def _offset_text(offset_s: int) -> str:
    minutes, seconds = divmod(abs(offset_s), 60)
    text = f"{'-' if offset_s < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}"
    return f"{text}:{seconds:02d}" if seconds else text
