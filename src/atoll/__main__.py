"""`python -m atoll` is `atoll`."""

from atoll.cli import main

if __name__ == "__main__":
    main()
