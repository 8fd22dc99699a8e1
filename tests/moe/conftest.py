"""Helpers of other rooms: small checkpoints beside the plugin tests, compilers in scripts."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "lib"), str(ROOT / "tests" / "plugin")]
