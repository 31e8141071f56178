"""Attacks as tools: what a finished run gives away, measured, with a sentence for each finding."""

from atoll.experiments.audit.findings import ATTACKS, Audit, audit

__all__ = ["ATTACKS", "Audit", "audit"]
