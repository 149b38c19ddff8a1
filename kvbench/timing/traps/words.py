"""Advice that several traps give."""

from __future__ import annotations

BUG = "do not use results of this build; report it with this output"
QUIET = "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head, and stop what is there"
