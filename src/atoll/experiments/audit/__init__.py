"""Attacks as tools: what a finished run gives away, measured, with a sentence for each finding.

found = audit("runs/mine", attacks=["membership"], references=2)
print(*found.sentences, sep="\n")
found.save("runs/mine/audit")
"""

from atoll.experiments.audit.findings import ATTACKS, Audit, audit

__all__ = ["ATTACKS", "Audit", "audit"]
