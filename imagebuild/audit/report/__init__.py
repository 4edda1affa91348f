"""Audit results for people and for machines, one module a format."""

from imagebuild.audit.report.json import json_report
from imagebuild.audit.report.text import text_report

__all__ = ["json_report", "text_report"]
