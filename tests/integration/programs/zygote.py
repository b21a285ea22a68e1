"""Forks the programs beside it, so that each need not import torch again. One a test session.

Arguments: a descriptor of a socket, and what to import beforehand. A request is a JSON list
``[program, options]`` with two descriptors, for the child's input and output; the answer is its pid.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    gc.freeze()
    while True:
        request, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
                os.close(fd)
            program, options = json.loads(request)
            sys.argv = [program, json.dumps(options)]
            try:
                runpy.run_path(str(HERE / program), run_name="__main__")
            finally:
                sys.stdout.flush()
                os._exit(0)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
