"""A kernel is used only after a small problem has shown that it is right here: verdicts, checks, diagnoses."""

from dsattn.backends.trust.gate import capturing, distrusted, refuse, standing

__all__ = ["capturing", "distrusted", "refuse", "standing"]
