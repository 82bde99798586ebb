"""What can go wrong between a state and the folder it is kept in; each is a miss, nothing worse.

    SpillFault
    ├── Absent          no such entry, or its file is gone
    ├── Corrupt         a file that is not what was written
    ├── ForeignVersion  a file of another version of the format
    ├── Unreadable      the system will not read it
    ├── NoMemory        no memory to read it into
    ├── Unwritable      the system will not write: read-only, no permission, a failing disk
    ├── DiskFull        no space, or no quota
    ├── FolderGone      the folder has vanished or was never there
    ├── TooLarge        larger than the whole cap
    └── Unfit           a delta without the earlier state that it continues

Raised by ``store.py`` alone, counted there by ``code``; nothing else comes out of it.
"""

from __future__ import annotations

import errno

from ..errors import TroupeError


class SpillFault(TroupeError):
    """A state that could not be saved or had back. ``code`` is the counter's name."""

    code = "fault"


class Absent(SpillFault):
    """The store has no such entry."""

    code = "absent"


class Corrupt(SpillFault):
    """A file of ours whose content is not what was written."""

    code = "corrupt"


class ForeignVersion(SpillFault):
    """A file that another version of the program wrote, or will write."""

    code = "foreign_version"


class Unreadable(SpillFault):
    """A file that is there and cannot be read."""

    code = "unreadable"


class NoMemory(SpillFault):
    """A state that there is no memory for."""

    code = "no_memory"


class Unwritable(SpillFault):
    """A folder that cannot be written to."""

    code = "unwritable"


class DiskFull(SpillFault):
    """No room on the disk."""

    code = "disk_full"


class FolderGone(SpillFault):
    """There is no folder."""

    code = "folder_gone"


class TooLarge(SpillFault):
    """A state that would not fit under the cap if it were alone."""

    code = "too_large"


class Unfit(SpillFault):
    """A delta that does not continue what is on disk."""

    code = "unfit"


def write_fault(error: OSError) -> SpillFault:
    """The fault that a failed write comes to."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(str(error))
    return Unwritable(str(error))
