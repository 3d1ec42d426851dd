"""Diagnosis of decode runs from logs, traces and profiler summaries."""

from workbench.diagnose.verdict import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
