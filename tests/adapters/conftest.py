"""Tests of adapters need no network and leave nothing in anybody's cache."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

HOME = tempfile.mkdtemp(prefix="aioloader-tests-")
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
# Read once, when `datasets` is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HOME=HOME)
