"""Tests of the proxy: they need no engine and no compiled extension. Run from the source tree when kvloom is not installed."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("kvloom") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
