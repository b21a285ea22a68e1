"""docs/fingerprint.md holds these vectors. Run this file to write them there."""

from __future__ import annotations

from pathlib import Path

from hotbunk.rollout.fingerprint import fingerprint_bytes, mix

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "fingerprint.md"
BEGIN, END = "<!-- vectors -->\n", "<!-- end -->"

VECTORS: list[tuple[str, bytes, int]] = [
    ("nothing", b"", 0),
    ("4096 zeros", bytes(4096), 0),
    ("`01`", b"\x01", 0),
    ("`01`", b"\x01", 1),
    ("`01`", b"\x01", 4),
    ("`01`", b"\x01", 4096),
    ("`01 02 03 04 05`", bytes(range(1, 6)), 0),
    ("`01 02 03 04 05`", bytes(range(1, 6)), 4093),
    ("0 to 255", bytes(range(256)), 0),
    ("0 to 255, 33 times", bytes(range(256)) * 33, 0),
    ("5000 times `ff`", b"\xff" * 5000, 0),
    ("5000 times `ff`", b"\xff" * 5000, 2**40 + 3),
]


def table() -> str:
    lines = ["| bytes | start | fingerprint |", "|---|---|---|"]
    lines += [
        f"| {name} | {start} | `0x{fingerprint_bytes(data, start):016x}` |"
        for name, data, start in VECTORS
    ]
    mixes = ", ".join(f"mix({x}) = `0x{mix(x):016x}`" for x in (0, 1, 2**32))
    return "\n".join([*lines, "", mixes, ""])


def test_the_document_holds_the_vectors() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table()


if __name__ == "__main__":
    head, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(f"{head}{begin}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
