"""Whose code a directory may hold: only what this user or root alone can put there is loaded. Knows no kernels."""

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

CODE_CACHES = (("TRITON_CACHE_DIR", ".triton"), ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"))
"""Variables that move the caches of packages that load what they find there, and where below the home they are
otherwise."""


def make_trusted(directory: Path) -> str | None:
    """Have `directory` there, with what is missing of its path for this user alone (0700).

    Returns:
        Why nothing in it may be loaded; None: only this user and root can have put there what is there.
    """
    try:
        for part in reversed((directory, *directory.parents)):
            if not part.exists():
                part.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{directory} cannot be made: {error.strerror}"
    return distrust(directory)


def distrust(path: Path) -> str | None:
    """Why what lies at `path` may be another user's; None: it is this user's or root's, and so is the way there.

    No part may be written by others, but for directories such as /tmp (sticky) on the way, in which each part is its
    owner's. A link counts as what it leads to, if it is this user's or root's itself.
    """
    own = (0, os.geteuid())
    whole = Path(os.path.abspath(path))
    try:
        for part in (*reversed(whole.parents), whole):
            found = os.lstat(part)
            if found.st_uid not in own:
                return f"{part} is another user's"
            if stat.S_ISLNK(found.st_mode):
                if part == whole:
                    return f"{part} is a link"
                if reason := distrust(Path(os.path.realpath(part))):
                    return reason
                continue
            is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX and part != whole
            if found.st_mode & _others_write(found) and not is_sticky:
                return f"{part} may be written by others"
    except OSError as error:
        return f"{error.filename} cannot be looked at: {error.strerror}"
    return None


def protect_caches(environment: MutableMapping[str, str]) -> list[str]:
    """Move the caches of CODE_CACHES to which others may have written, unless a variable of the environment has moved
    them already: where the home is of all, as /tmp is, a package would load what is planted there.

    Returns:
        Why, one reason for each.
    """
    home, reasons = Path(environment.get("HOME") or "~").expanduser(), []
    for variable, place in CODE_CACHES:
        if variable in environment or (distrust(home) is None and not os.path.lexists(home / place)):
            continue
        reason = make_trusted(home / place)
        if reason is not None:
            environment[variable] = str(private_directory() / variable.lower())
            reasons.append(f"{reason}: {variable} is {environment[variable]}")
    return reasons


@cache
def private_directory() -> Path:
    """A new directory that is this user's alone, and goes with this process."""
    directory = Path(tempfile.mkdtemp(prefix="pagoda-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _others_write(found: os.stat_result) -> int:
    """The bits that let others write. A group of the same number as the user is this user's alone, by convention."""
    is_own_group = found.st_gid == os.getegid() == os.geteuid()
    return stat.S_IWOTH if is_own_group else stat.S_IWOTH | stat.S_IWGRP
