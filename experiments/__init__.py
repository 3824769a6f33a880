"""Experiments: one question per file, one shared harness. Run them as scripts."""

import os

# Threads that wait for work shall sleep, not spin: torch's pool and fpemu's share the cores, and on
# a busy machine spinning makes a training step ten times slower. Must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
