"""The table of `rollout_scale`; a test compares docs/results_system.md with it."""

from __future__ import annotations

from typing import Any

_COLUMNS = ["responses x tokens", "ranks", "controllers", "exchange", "keep", "check", "plan", "together (elapsed)"]
_COLUMNS += ["asking servers", "packing, of the servers", "host MB", "device MB"]
HEAD = "| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|"


def line(row: dict[str, Any]) -> str:
    """One row: seconds of the parts and of all of them, those of the servers' answers, and memory."""
    cells = [f"{row['responses']:,} x {row['tokens']:,}", str(row["ranks"]), str(row["controllers"])]
    cells += [f"{row[name]:.3f}" for name in ("gather_seconds", "cache_seconds", "check_seconds", "plan_seconds")]
    cells += [f"{row['rank0_seconds']:.2f} ({row['rank0_elapsed_seconds']:.2f})"]
    cells += [f"{row['client_seconds']:.2f}", f"{row['pack_seconds']:.2f}"]
    cells += [f"{row['host_bytes_per_rank'] / 1e6:,.0f}", f"{row['device_bytes_per_rank'] / 1e6:,.0f}"]
    return "| " + " | ".join(cells) + " |"
