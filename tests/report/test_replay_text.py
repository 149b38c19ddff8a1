"""What `kvbench replay` tells people: what was rejected and why, and which numbers do not compare."""

from __future__ import annotations

import pytest

from kvbench.cli.main import main


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", "loogle", "--requests", "60", "--rate", "1", "--no-db", *words]) == 0
    return capsys.readouterr().out


def test_policies_that_served_different_requests_do_not_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """NEO takes no prompt of more than `tokens`: it leaves out the longest, and looks faster for it."""
    text = told(capsys, "--policy", "neo,lru")
    assert "1/s: not the same requests were served (neo " in text
    assert ", lru 60): times and rates do not compare" in text
    assert "would admit it" in text


def test_policies_that_served_the_same_requests_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--policy", "neo,lru", "--param", "neo.tokens=100000")
    assert "lru" in text
    assert "do not compare" not in text
    assert "rejected, the first" not in text
