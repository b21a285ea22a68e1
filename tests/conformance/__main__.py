"""``python -m hotbunk.conformance``: the suite by itself."""

from hotbunk.conformance.command import main

main()
