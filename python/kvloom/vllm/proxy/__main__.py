"""python -m kvloom.vllm.proxy: reads the command line, serves until SIGTERM, drains, and ends with 1 if requests were cut."""

import asyncio
import sys

from kvloom.vllm.proxy.config import ConfigError, read_command_line
from kvloom.vllm.proxy.log import to_stream
from kvloom.vllm.proxy.server import serve


def main() -> int:
    """Run the proxy. @error a bad command line or config file: one sentence on stderr and status 2."""
    try:
        settings = read_command_line(sys.argv[1:])
    except ConfigError as error:
        print(f"kvloom.vllm.proxy: {error}", file=sys.stderr)
        return 2
    to_stream(sys.stderr, settings.log_level)
    try:
        return asyncio.run(serve(settings))
    except OSError as error:
        print(f"kvloom.vllm.proxy: can't listen on {settings.host}:{settings.port}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
