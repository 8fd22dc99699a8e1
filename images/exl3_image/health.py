"""The health check: 0 where the server answers /health, else 1 with the reason in one line.

Runs every few seconds, so it is one file of standard library, started without site packages.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path

ENDPOINT = Path(os.environ.get("TMPDIR", "/tmp")) / "exl3-endpoint.json"
TIMEOUT_S = 4


def main() -> int:
    """Ask the server that the entry point started."""
    try:
        endpoint = json.loads(ENDPOINT.read_text())
    except (OSError, ValueError):
        print("no server was started in this container")
        return 1
    connection = http.client.HTTPConnection(endpoint["host"], endpoint["port"], timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        address = f"{endpoint['host']}:{endpoint['port']}"
        print(f"{address} does not answer: {type(error).__name__}: {error}")
        return 1
    finally:
        connection.close()
    print(f"/health says {status}")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
