"""The random load command from start to end, for a few minutes: 80 requests, then the engine is killed.

The default stage has a smaller load in test_server_stream.py, whose servers run already; the judges are
tested in tests/core/test_benchmark_random_load.py.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specplug import server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "random_load.py"


def test_a_short_load(rig, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--requests", "80", "--out", str(out), "--chaos"]
    environment = server.engine_environment(on_gpu=False)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((out / "result.json").read_text())
    assert result["wrong"] == []
    rows = result["result"]
    assert rows["requests"] == 80
    assert rows["answers compared with plain decoding"] > 40
    assert rows["clients that left"] > 3
    assert rows["invalid requests, all refused with 4xx"] > 1
    assert rows["mismatches"] == 0
    assert rows["engine killed: /health fails"] == "yes"
    assert (out / "table.md").read_text() in done.stdout
