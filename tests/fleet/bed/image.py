"""The engine image of the bed: nearly empty, for the machine's own programs and this checkout are mounted into it.

A node's Docker copies an image whole for every container (its driver is vfs), so what is in it must be small. Its id is
made from its content alone: every node that loads it has the same one, and a `variant` has another.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / ".venv"
_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}

_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
_DIRECTORIES = (
    "etc",
    "etc/ssl",
    "usr",
    "root",
    "tmp",
    "var",
    "var/tmp",
    "run",
    "proc",
    "sys",
    "dev",
    "srv",
    "mnt",
)
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/run": "/run"}


def host_paths() -> tuple[str, ...]:
    """What nodes and containers see of the machine that is not on every Debian: this checkout and its Python."""
    python = Path(sys.base_prefix).resolve()
    return tuple(str(path) for path in (ROOT, python) if not path.is_relative_to("/usr"))


def mounts() -> tuple[str, ...]:
    """What the engine's containers mount, as `[engine] mounts` takes it."""
    return tuple(f"{path}:{path}:ro" for path in ("/usr", "/etc/ssl", *host_paths()))


@dataclass(frozen=True, slots=True)
class EngineImage:
    """One image. Another `variant` is another build of the same name: another digest."""

    tag: str = "deskfleet-bed:engine"
    variant: str = ""

    @property
    def id(self) -> str:
        """Its digest as Docker names images: `sha256:...` of the configuration."""
        return "sha256:" + hashlib.sha256(self._config()).hexdigest()

    def archive(self) -> bytes:
        """What `docker load` reads."""
        config = self._config()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        manifest = [{"Config": config_name, "RepoTags": [self.tag], "Layers": ["layer.tar"]}]
        return _tar(
            {config_name: config, "layer.tar": _layer(), "manifest.json": json.dumps(manifest).encode()}
        )

    def _config(self) -> bytes:
        document = {
            "architecture": _ARCH.get(platform.machine(), platform.machine()),
            "os": "linux",
            "created": "2026-01-01T00:00:00Z",
            "config": {
                "Env": [
                    f"PATH={VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
                    "HOME=/root",
                    "LANG=C.UTF-8",
                ],
                "Labels": {"deskfleet.bed.variant": self.variant},
            },
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(_layer()).hexdigest()]},
            "history": [{"created": "2026-01-01T00:00:00Z", "created_by": "tests/fleet/bed"}],
        }
        return json.dumps(document, sort_keys=True).encode()


def _layer() -> bytes:
    links = {name: target for name, target in _LINKS.items() if Path("/", name).is_symlink()}
    return _tar({name: text.encode() for name, text in _FILES.items()}, _DIRECTORIES, links)


def _tar(
    files: dict[str, bytes], directories: tuple[str, ...] = (), links: dict[str, str] | None = None
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in directories:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            tar.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return buffer.getvalue()
