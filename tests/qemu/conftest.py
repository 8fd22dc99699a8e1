"""The generator of host trees in tests/host is held against the live guest here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))
