"""Recordings: what the wrappers of a real cuDNN frontend did on a GPU, and whether its stand-in does the same."""

from __future__ import annotations

from dsattn.verify.recordings.file import FORMAT, Check, Recording, read, write
from dsattn.verify.recordings.recorder import Recorder, record
from dsattn.verify.recordings.replay import Replay, replay

__all__ = ["FORMAT", "Check", "Recorder", "Recording", "Replay", "read", "record", "replay", "write"]
