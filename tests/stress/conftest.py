"""The modules beside the tests are imported by name, here and by the scripts that run on ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
