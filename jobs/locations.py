"""Where files are: local paths and URLs opened as filesystems, and which of them a job may name.

A job says which file, and nothing about how it is reached: endpoint, scheme, proxy and credentials come from the
environment of the process that opens it, or from the input root that the file lies under.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

import pyarrow as pa
from pyarrow import fs

from jobs.errors import InputError, UnreadableInputError
from jobs.urls import hide_secrets

Roots = Sequence[str]  # folders and URLs that jobs may read under; none: any file

_AZURE = ("abfs", "abfss")
_REMOTE = ("s3", "gs", "gcs", "hdfs", "viewfs", *_AZURE)
# Options of a URL that a job may set, with what they may look like: a region is part of a host's name.
_JOB_OPTIONS = {"s3": {"region": re.compile(r"[a-z0-9-]{1,40}")}}
_FILESYSTEMS_KEPT = 32  # opening a bucket may ask the network for its region
_ERROR_CHARACTERS = 300  # Hadoop's loader lists hundreds of paths that it tried


def is_url(name: str) -> bool:
    """Return whether an input is a URL rather than a local path."""
    return "://" in name


def open_input(name: str, roots: Roots = ()) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a file that a job names, and the file's path in it.

    A URL under one of the roots is opened with the options (`?endpoint_override=…`) of that root.

    Raises:
        InputError: the URL means nothing, or sets what a job may not set.
        UnreadableInputError: the filesystem cannot be reached.
    """
    filesystem, _, path = locate(name, roots)
    return filesystem, path


def locate(name: str, roots: Roots = ()) -> tuple[fs.FileSystem, str, str]:
    """Return as `open_input` does, with the path of the URL's `/` in the filesystem between the two."""
    if not is_url(name):
        return fs.LocalFileSystem(), "", name
    parts = check_url(name)
    path = unquote(parts.path)
    if parts.scheme == "file":
        return fs.LocalFileSystem(), "", path
    root = next((urlsplit(root) for root in roots if is_url(root) and _lies_under(name, root)), parts)
    options = {**dict(parse_qsl(parts.query)), **dict(parse_qsl(root.query))}
    filesystem, base = open_url(f"{parts.scheme}://{root.netloc}/{f'?{urlencode(options)}' if options else ''}")
    base = base.rstrip("/")
    return filesystem, base, f"{base}/{path.lstrip('/')}"


@lru_cache(_FILESYSTEMS_KEPT)
def open_url(url: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem and the path of any URL that pyarrow opens: for what the person at the keyboard names.

    Raises InputError for a URL that means nothing, UnreadableInputError when the filesystem cannot be reached.
    """
    shown = _without_options(urlsplit(url))
    try:
        filesystem, path = fs.FileSystem.from_uri(url)
    except (pa.ArrowInvalid, ValueError) as error:
        raise InputError(f"{shown}: cannot be opened: {short_error(error)}") from error
    except OSError as error:
        raise UnreadableInputError(f"{shown}: cannot be reached: {short_error(error)}") from error
    return filesystem, path


def short_error(error: Exception) -> str:
    """Return the first line of an error without secrets of URLs; a filesystem's may have hundreds of lines."""
    return (hide_secrets(error).splitlines() or [type(error).__name__])[0][:_ERROR_CHARACTERS]


def check_root(name: str, roots: Roots) -> None:
    """Raise InputError unless the file, its symlinks followed, lies under one of the roots; no roots allow any file.

    A URL is refused in any case when it sets what a job may not set.
    """
    if roots and not any(_lies_under(name, root) for root in roots):
        allowed = ", ".join(_without_options(urlsplit(root)) if is_url(root) else root for root in roots)
        raise InputError(f"{name}: not under an input root ({allowed}); add its folder to LAYA_BATCH_INPUT_ROOTS")
    if is_url(name):
        check_url(name)


def check_url(name: str) -> SplitResult:
    """Return the parts of a URL that a job names, checked.

    Raises InputError when it sets an endpoint, a user or another option that is not a job's to set, or when its path
    leads upwards.
    """
    parts = urlsplit(name)
    shown = _without_options(parts)
    if not name.isprintable() or "\\" in name or parts.fragment:
        raise InputError(f"{shown!r}: a URL is written without fragment, backslash or control characters")
    if (parts.scheme != "file" and parts.scheme not in _REMOTE) or not name.startswith(f"{parts.scheme}://"):
        raise InputError(f"{shown}: unknown kind of URL; use a path, or {', '.join(f'{s}://' for s in _REMOTE)}")
    if parts.scheme == "file" and parts.netloc:
        raise InputError(f"{shown}: a file URL has no host; write file:///folder/file")
    if parts.scheme != "file" and not parts.netloc:
        raise InputError(f"{shown}: names no bucket or host")
    user = parts.netloc.rpartition("@")[0]
    if user and not (parts.scheme in _AZURE and ":" not in user) and (parts.scheme, user) != ("gs", "anonymous"):
        raise InputError(f"{shown}: names a user; credentials belong to the environment of the workers")
    for option, value in parse_qsl(parts.query, keep_blank_values=True):
        pattern = _JOB_OPTIONS.get(parts.scheme, {}).get(option)
        if pattern is None or not pattern.fullmatch(value):
            raise InputError(
                f"{shown}: a job cannot set {option!r}; add it to the root that the workers read under, as in "
                f"LAYA_BATCH_INPUT_ROOTS={shown}?{option}=…, or use the environment"
            )
    if ".." in unquote(parts.path).split("/"):  # %2e%2e is .. to a filesystem
        raise InputError(f"{shown}: a URL's path cannot hold '..'")
    return parts


def _without_options(parts: SplitResult) -> str:
    """Return the URL as a log or a person may see it."""
    return f"{parts.scheme}://{_authority(parts)}{parts.path}"


def _authority(parts: SplitResult) -> str:
    """Return the bucket or host of a URL, without credentials. On Azure the container stands where a user would."""
    user, _, host = parts.netloc.rpartition("@")
    return f"{user.partition(':')[0]}@{host}" if user and parts.scheme in _AZURE else host


def _lies_under(name: str, root: str) -> bool:
    local_name, local_root = local_path(name), local_path(root)
    if local_name is not None and local_root is not None:
        return Path(local_name).resolve().is_relative_to(Path(local_root).resolve())
    if local_name is not None or local_root is not None:
        return False
    file, folder = urlsplit(name), urlsplit(root)
    below = [part for part in unquote(folder.path).split("/") if part]
    path = unquote(file.path).split("/")[1:]
    same_place = file.scheme == folder.scheme and _authority(file) == _authority(folder)
    return same_place and ".." not in path and path[: len(below)] == below


def local_path(name: str) -> str | None:
    """Return where a file of this machine lies, be it named by a path or a URL; None for any other."""
    if not is_url(name):
        return name
    parts = urlsplit(name)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc else None
