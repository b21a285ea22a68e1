"""A stock vLLM server in a process of its own, as its users start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

START_SECONDS = 180.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
ARGUMENTS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "16"),
    *("--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--enforce-eager", "--enable-prompt-tokens-details", "--served-model-name", "m"),
)


class StockServer:
    """``python -m vllm.entrypoints.openai.api_server``, in a process group of its own."""

    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
                *(*ARGUMENTS, *arguments),
            ],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ready(self) -> StockServer:
        """Wait until it serves."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).raise_for_status()
                return self
            except httpx.HTTPError:
                time.sleep(0.2)
        self._said.seek(0)
        said = self._said.read()[-3000:]
        self.close()
        raise AssertionError(f"it did not start: {said}")

    def signal(self, number: int) -> None:
        """To the server and the engine cores that it started."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it, and all that it started."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                pass
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing is left of the group
        self.process.wait()
        self._said.close()
