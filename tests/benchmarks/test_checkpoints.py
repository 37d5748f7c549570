"""Steps wait for checkpoints for less than 2% of the time between them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoints.py"


@pytest.mark.slow
def test_the_wait_is_a_small_share(tmp_path):
    """Of 100 steps of latte_tiny on this machine; its runs save half as often."""
    found = tmp_path / "found.json"
    command = [sys.executable, str(FILE), "--every", "100", "--json", str(found)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(found.read_text())["share"] < 0.02
