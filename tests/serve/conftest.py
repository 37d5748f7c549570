"""A server in a process of its own, on a run of random weights."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.hf.folders import make_run
from tests.training.tiny import ENVIRONMENT


@dataclass(frozen=True)
class Server:
    """Where a server is, and the run behind it."""

    run_dir: Path
    url: str

    def client(self, **settings) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, **settings)


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Server]:
    run_dir = make_run(tmp_path_factory.mktemp("serve") / "run", "latte_r_swa")
    options = ["--port", "0", "--slots", "4", "--max-length", "200", "--max-requests", "12"]
    process = subprocess.Popen(
        [sys.executable, "-m", "latte", "serve", "--run", str(run_dir), *options],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    yield Server(run_dir, re.findall(r"http://\S+", line)[0])
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    process.stdout.close()
