"""What a check found: its verdict in one line, and the numbers behind it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nemo_oprd.commands.doctor.codes import CODES
from nemo_oprd.runtime.files import write_atomically

Verdict = Literal["ok", "warning", "wrong", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: the name of the check, as docs/doctor.md lists it.
        verdict: `wrong` fails the command; a `warning` does not; `skipped`: the check does not apply.
        text: one line: what was found, and for a warning or something wrong also what was expected and the fix.
        numbers: what was measured, by name; plain JSON values.
        code: of a warning or something wrong, its name in `CODES`; else None.
    """

    check: str
    verdict: Verdict
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    code: str | None = None

    def __post_init__(self) -> None:
        """Every finding that asks for something to be done has a code, and no other one."""
        assert self.code in CODES if self.verdict in ("warning", "wrong") else self.code is None, self

    @property
    def line(self) -> str:
        """The finding as one line for the terminal."""
        named = "" if self.code is None else f"{self.code}: "
        return f"{self.verdict:<8} {self.check:<20} {named}{' '.join(self.text.split())}"

    def about(self, teacher: str | None) -> Finding:
        """The same finding about one of several teachers; None: there is only one."""
        if teacher is None:
            return self
        return replace(self, text=f"teacher {teacher}: {self.text}", numbers={"teacher": teacher, **self.numbers})


def flag(check: str, verdict: Verdict, code: str, text: str, **numbers: Any) -> Finding:
    """A warning or something wrong."""
    return Finding(check, verdict, text, numbers, code)


class Report:
    """The findings of one command, printed as they come; on the first rank only, which `speaks`."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks, self.findings = speaks, list[Finding]()

    def add(self, findings: Finding | Iterable[Finding]) -> None:
        """Keeps findings and prints a line for each."""
        for finding in [findings] if isinstance(findings, Finding) else findings:
            if self.speaks:
                self.findings.append(finding)
                print(finding.line, flush=True)

    @property
    def is_wrong(self) -> bool:
        """Whether any check found something wrong."""
        return self._counts["wrong"] > 0

    def summary(self) -> str:
        """The last line."""
        counts = self._counts
        return f"{counts['wrong']} wrong, {counts['warning']} warnings, {counts['ok']} ok, {counts['skipped']} skipped"

    def write(self, file: Path) -> None:
        """Writes all findings with their numbers as JSON."""
        content = {"summary": dict(self._counts), "findings": [asdict(finding) for finding in self.findings]}
        write_atomically(file, json.dumps(content, indent=1) + "\n")

    @property
    def _counts(self) -> Counter[str]:
        return Counter(finding.verdict for finding in self.findings)
