"""`python -m hotbunk`."""

from hotbunk.cli import main

if __name__ == "__main__":
    main()
