"""Hooks into other libraries, each imported by its own name: `from dsattn.integrations import megatron`."""
