"""The command `mlx_paged.server`."""

from .cli.server import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
