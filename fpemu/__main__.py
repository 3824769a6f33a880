"""``python -m fpemu`` is the ``fpemu`` command."""

from fpemu.cli import main

if __name__ == "__main__":
    main()
