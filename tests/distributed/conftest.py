"""The ranks fork from this process: it must have imported Megatron before the first test."""

from __future__ import annotations

from megalatent import platform

platform.install()
