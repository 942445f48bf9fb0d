"""The command line of a bubblewrap container: which files it can read, its environment, its user."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from trimtab.errors import TrimtabError
from trimtab.trainer.sandbox.code_result import Limits
from trimtab.trainer.sandbox.container_init import HIDDEN, NOBODY
from trimtab.trainer.sandbox.seccomp import code_filter

INIT = Path(__file__).with_name("container_init.py")
OLDEST = "0.8"  # the first version with --disable-userns
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not /dev/zero: mapping it gives memory that no limit counts
PYTHON, PACKAGES, SCRIPT = "/python", "/packages", "/container_init.py"  # paths inside the container
DIRECTORIES = ("/dev", "/etc", "/usr", PYTHON, f"{PYTHON}/bin", PACKAGES)  # made with 0755; the default is 0700
ISOLATION = [
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"),
    *("--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"),
]
# Process 1 has these capabilities at first: to open /proc, and if it is root, to change its user. Then it drops them.
OPEN_PROC = ("--cap-add", "CAP_DAC_READ_SEARCH")
CHANGE_USER = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
USER_NAMESPACE = ("--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY))
# One thread for each linear algebra library, because containers run beside the trainer.
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONPATH": PACKAGES,
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def container_command(limits: Limits, packages: Sequence[str]) -> list[str]:
    """Returns the command line of `bwrap`, without the option `--seccomp`."""
    program = shutil.which("bwrap")
    if program is None:
        raise TrimtabError('the sandbox "bubblewrap" needs a program that is not installed: apt install bubblewrap')
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.split()[-1:]
    if not version or Version(version[0]) < Version(OLDEST):
        installed = version[0] if version else "unknown"
        raise TrimtabError(f"bubblewrap {installed} is older than {OLDEST}: apt install a newer bubblewrap")
    distributions = [_find_distribution(name) for name in packages]
    modules = [module for distribution in distributions for module in _list_modules(distribution)]
    return [
        *(program, *ISOLATION, *OPEN_PROC, *(CHANGE_USER if os.geteuid() == 0 else USER_NAMESPACE)),
        *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *(word for path in DIRECTORIES for word in ("--perms", "0755", "--dir", path)),
        *_mount_system(),
        *_mount_interpreter(),
        *(word for path, name in _list_files(distributions) for word in ("--ro-bind", str(path), f"{PACKAGES}/{name}")),
        *("--ro-bind", str(INIT), SCRIPT),
        *("--perms", "0000", "--dir", HIDDEN, "--proc", f"{HIDDEN}/proc", "--remount-ro", f"{HIDDEN}/proc"),
        *("--perms", "1777", "--size", str(limits.memory_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/"),
        *("--", f"{PYTHON}/bin/python", "-s", "-S", "-B", "-P", "-X", "utf8", SCRIPT),
        *(str(limits.timeout), str(limits.memory_mb), str(limits.max_output)),
        *(code_filter(platform.machine()).hex(), *modules),
    ]


def _mount_system() -> Iterator[str]:
    for library in LIBRARIES:
        if os.path.islink(library):
            yield from ("--symlink", os.readlink(library), library)
        elif os.path.isdir(library):
            yield from ("--ro-bind", library, library)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    for device in DEVICES:
        yield from ("--dev-bind", device, device)


def _mount_interpreter() -> Iterator[str]:
    """Yields options that mount this interpreter with its standard library, without the installed packages."""
    standard = Path(sysconfig.get_path("stdlib"))
    library = standard.parent
    yield from ("--ro-bind", os.path.realpath(sys.executable), f"{PYTHON}/bin/python")
    yield from ("--ro-bind", str(library), f"{PYTHON}/{library.name}")
    if (standard / "site-packages").is_dir():
        hidden = f"{PYTHON}/{library.name}/{standard.name}/site-packages"
        yield from ("--tmpfs", hidden, "--remount-ro", hidden)


def _find_distribution(name: str) -> importlib.metadata.Distribution:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise TrimtabError(f"the package {name!r} for the sandbox is not installed: pip install {name}") from None
    if not _list_modules(distribution):
        raise TrimtabError(f"the package {name!r} has no files (an editable install?): pip install {name}")
    return distribution


def _list_modules(distribution: importlib.metadata.Distribution) -> list[str]:
    """Returns the names of the packages that a distribution installs, or of its modules if it has no package."""
    files = [file for file in distribution.files or () if file.parts[0] != ".."]
    names = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
    return sorted(names or {file.stem for file in files if len(file.parts) == 1 and file.suffix == ".py"})


def _list_files(distributions: Sequence[importlib.metadata.Distribution]) -> list[tuple[Path, str]]:
    """Returns the paths of the distributions and their dependencies, each with its name in `site-packages`."""
    waiting, seen = list(distributions), {distribution.name for distribution in distributions}
    paths: dict[str, Path] = {}
    while waiting:
        distribution = waiting.pop()
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            paths.setdefault(name, Path(str(distribution.locate_file(name))))
        for line in distribution.requires or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in seen:
                seen.add(requirement.name)
                waiting.append(_find_distribution(requirement.name))
    return sorted((path, name) for name, path in paths.items() if path.exists())
