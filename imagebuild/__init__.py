"""Builds, audits and verifies the image that serves GLM-5.3-Flash on sm_120 and sm_121."""

__version__ = "0.1.0"
