"""A released megatron-core, downloaded by pip, unpacked into the cache and never installed."""

from __future__ import annotations

import zipfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

from dsattn.errors import BadInput
from dsattn.integrations.megatron_module import DISTRIBUTION
from dsattn.wheels import cache_folder, put, scratch, wheel


def unpacked(version: str, cache: Path | None = None) -> Path:
    """The folder with a release's packages, made on first use.

    Args:
        version: the release, as "0.19.2".
        cache: where downloads are kept; None for dsattn's own place.

    Raises:
        BadInput: no such release, or the cache cannot be written.
        Unreachable: the package index does not answer.
    """
    try:
        release = Version(version)
    except InvalidVersion:
        raise BadInput(DISTRIBUTION, given=f"release {version!r}", needed="a release, as '0.19.2'") from None
    cache = cache or cache_folder()
    folder = cache / "megatron" / str(release)
    if folder.is_dir():
        return folder
    path = wheel(DISTRIBUTION, release, cache / "wheels")
    with scratch(folder.parent) as fresh:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(fresh / "whole")
        put(fresh / "whole", folder)
    return folder
