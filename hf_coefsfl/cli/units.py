"""Reading quantities with units: bandwidths, latencies and speeds of devices."""

from __future__ import annotations

import math
import re

BANDWIDTHS = {"bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9}  # bits per second
SPEEDS = {"gflops": 1e9, "tflops": 1e12, "pflops": 1e15}  # operations per second
LATENCIES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # seconds


def parse_bandwidth(text: str) -> float:
    """Return bits per second.

    >>> parse_bandwidth("20Mbps")
    20000000.0
    """
    value = _parse(text, BANDWIDTHS, "bandwidth", "20Mbps")
    if value == 0:
        raise ValueError(f"A bandwidth must be above 0, got {text!r}.")
    return value


def parse_speed(text: str) -> float:
    """Return operations per second.

    >>> parse_speed("10TFLOPS")
    10000000000000.0
    """
    value = _parse(text, SPEEDS, "speed", "10TFLOPS")
    if value == 0:
        raise ValueError(f"A speed must be above 0, got {text!r}.")
    return value


def parse_latency(text: str) -> float:
    """Return seconds.

    >>> parse_latency("50ms")
    0.05
    """
    return _parse(text, LATENCIES, "latency", "50ms")


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units or not math.isfinite(float(match[1])):
        raise ValueError(f"{text!r} is not a {what}: give a number and one of {', '.join(units)}, e.g. {example}.")
    return float(match[1]) * units[unit]
