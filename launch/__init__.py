"""Commands: the only package with flags, environment variables, printing and process start-up."""

import sys

# Before any module of a command is imported: most of them need fcntl, which Windows does not have.
if sys.platform == "win32":
    print("error: diffumesh runs on Linux and macOS; on Windows, use WSL", file=sys.stderr)
    sys.exit(2)
