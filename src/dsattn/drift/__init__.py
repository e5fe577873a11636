"""What changed in the call contract between two releases of a kernel package: static, nothing is imported or run."""
