"""``hotbunk doctor``: what of hotbunk works on this machine, and how to get the rest."""

from __future__ import annotations

import ctypes
import importlib.util
import json as json_module
import os
import platform
from importlib import metadata

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotbunk import __version__
from hotbunk.cli import trainers
from hotbunk.cli.finding import Finding
from hotbunk.rollout import allocator, native, registry
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.memory import NativePool
from hotbunk.rollout.native_kernels import Variant

# What a backend or transport imports when it is built, beyond hotbunk itself.
_NEEDS = {
    "reference": ("torch", "transformers", "safetensors"),
    "naive": ("torch",),
    "collective": ("torch",),
    "disk": ("torch",),
    "ipc": ("torch",),
    "hotbunk_http": ("httpx", "tenacity"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "trtllm": ("tensorrt_llm",),
    "ascend": ("vllm_ascend",),
    "nixl": ("nixl",),
    "mooncake": ("mooncake",),
}


def run(*, json: bool) -> None:
    """See :func:`hotbunk.cli.doctor`."""
    found = findings()
    if json:
        typer.echo(json_module.dumps(msgspec.to_builtins(found), indent=1))
        return
    table = Table(title=f"hotbunk {__version__}", title_justify="left")
    for name in ("kind", "name", "usable", "", "how to get it"):
        table.add_column(name, overflow="fold")
    for one in found:
        mark = Text("yes", "green") if one.usable else Text("no", "yellow")
        table.add_row(one.kind, one.name, mark, Text(one.why), Text(one.remedy))
    Console().print(table)


def findings() -> list[Finding]:
    """Everything that was looked at. Nothing heavy is imported and no device is touched."""
    return [
        *_versions(),
        *_drivers(),
        *_settings(),
        *_native(),
        *_plugins("backend", registry.BACKENDS),
        *_plugins("transport", registry.TRANSPORTS),
        *trainers.findings(),
    ]


def _versions() -> list[Finding]:
    found = [Finding("version", "python", True, platform.python_version())]
    try:
        found.append(Finding("version", "torch", True, metadata.version("torch")))
    except metadata.PackageNotFoundError:
        remedy = "pip install 'hotbunk[torch]'"
        found.append(Finding("version", "torch", False, "not installed", remedy))
    return found


def _drivers() -> list[Finding]:
    cuda = os.environ.get("HOTBUNK_CUDA_LIBRARY") or "libcuda.so.1"
    acl = os.environ.get("HOTBUNK_ACL_LIBRARY") or "libascendcl.so"
    return [
        *_host_drivers(),
        _driver("cuda", cuda, "a machine with an NVIDIA GPU and its driver"),
        _driver("acl", acl, "a machine with an Ascend NPU and CANN"),
    ]


def _devices() -> list[str]:
    return [one.name for one in _drivers()[-2:] if one.usable]


def _host_drivers() -> list[Finding]:
    """Memory of this machine: as files, and private; the kinds are the library's to find."""
    pages = f"pages of {os.sysconf('SC_PAGESIZE')} bytes"
    found = []
    for name in ("host", "shared"):
        try:
            pool = NativePool(name)
        except native.NativeUnavailable as error:
            found.append(Finding("driver", name, False, "memory is not released", error.remedy))
        except Unsupported as error:
            found.append(Finding("driver", name, False, error.what, error.remedy or "use host"))
        else:
            found.append(Finding("driver", name, True, f"{pool.kind}, {pages}"))
            pool.close()
    return found


def _settings() -> list[Finding]:
    """What is set around us and gets in the way."""
    variable = allocator.preflight()
    why = (
        f"{variable} turns them on; memory of hotbunk's pools does not mind, but an engine that "
        "sleeps through torch's own allocator may not start: unset it then"
    )
    return [Finding("setting", "expandable segments", True, why if variable else "not asked for")]


def _driver(name: str, library: str, remedy: str) -> Finding:
    try:
        lib = ctypes.CDLL(library)
    except OSError as error:
        return Finding("driver", name, False, str(error), remedy)
    if why := _no_device(name, lib):
        return Finding("driver", name, False, f"{library}: {why}", remedy)
    return Finding("driver", name, True, library)


def _no_device(name: str, lib: ctypes.CDLL) -> str:
    """Why a driver that loads finds nothing; empty when it does. No context is made."""
    if name != "cuda":
        return ""
    device = ctypes.c_int()
    for function, arguments in (("cuInit", (0,)), ("cuDeviceGet", (ctypes.byref(device), 0))):
        call = getattr(lib, function, None)
        if call is None:
            return f"it has no {function}"
        if code := call(*arguments):
            return f"{function} says {code}"
    return ""


def _native() -> list[Finding]:
    try:
        found = native.load()
    except native.NativeUnavailable as error:
        why = "torch operations do the work, slower"
        return [
            Finding("native", "library", False, error.what, error.remedy),
            Finding("native", "kernels", False, why, error.remedy),
        ]
    kernels = found.kernels
    able = [v.name.lower() for v in Variant if v and kernels.has(v)]
    text = f"{kernels.variant.name.lower()} of {', '.join(able)}; {kernels.threads} threads"
    fatbin = native.path().parent / "hotbunk_kernels.fatbin"
    if fatbin.is_file():
        why = kernels.why_not_cuda()
        remedy = "a machine with an NVIDIA GPU and its driver" if why else ""
        cuda = Finding("native", "cuda kernels", not why, why or str(fatbin), remedy)
    else:
        cuda = Finding(
            "native",
            "cuda kernels",
            False,
            "built without nvcc; torch operations do the work on GPUs",
            "put nvcc (CUDA 12.8 or newer) on PATH and reinstall hotbunk from source",
        )
    where = f"{found.version}, ABI {found.abi_version}, {found.path}"
    return [
        Finding("native", "library", True, where),
        Finding("native", "kernels", True, text),
        cuda,
    ]


def _plugins(kind: str, group: str) -> list[Finding]:
    found = []
    for point in sorted(metadata.entry_points(group=group)):
        absent = [n for n in _NEEDS.get(point.name, ()) if not _installed(n)]
        if absent:
            error = registry.missing(point.name, ModuleNotFoundError(name=absent[0]))
            remedy = getattr(error, "remedy", "") or f"pip install {absent[0]}"
            found.append(
                Finding(kind, point.name, False, f"{', '.join(absent)} not installed", remedy)
            )
        elif point.name == "ipc" and not (devices := _devices()):
            found.append(
                Finding(
                    kind,
                    point.name,
                    False,
                    "no device here has memory to share; device=fake is simulated",
                    "a machine with an NVIDIA GPU or an Ascend NPU, or transport=shm",
                )
            )
        elif point.name == "ipc":
            found.append(Finding(kind, point.name, True, f"{point.value} ({', '.join(devices)})"))
        elif not _installed(point.module):
            why = f"its entry point names {point.module}, which is not there"
            found.append(
                Finding(kind, point.name, False, why, "reinstall the package it came with")
            )
        else:
            found.append(Finding(kind, point.name, True, point.value))
    return found


def _installed(module: str) -> bool:
    """Whether a module could be imported; only its parents are."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
