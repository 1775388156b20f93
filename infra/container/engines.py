"""Engines that build and run the image: Docker or Podman, or Buildah if no container can be started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 600.0
CALL_SECONDS = 60.0
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
STATE = "/var/lib/imds-bridge"


def choose(name: str | None) -> Client | Buildah:
    """Return the engine of that name, or the first that works here.

    Raises:
        SystemExit: none does.
    """
    for client in ("docker", "podman"):
        if name in (None, client) and _works(client):
            return Client(client)
    if name in (None, "buildah") and os.geteuid() == 0 and all(map(shutil.which, ("buildah", "mmdebstrap"))):
        return Buildah()
    raise SystemExit(
        "container: nothing works here: expected Docker, Podman, or Buildah with mmdebstrap and root's rights"
    )


def run(*command: str, timeout_seconds: float = CALL_SECONDS) -> str:
    """Run a command that must succeed; return its output.

    Raises:
        SystemExit: it failed, with its output, or timed out.
    """
    try:
        done = call(*command, timeout_seconds=timeout_seconds)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"container: not within {timeout_seconds:g} s: {' '.join(command)}") from None
    if done.returncode:
        raise SystemExit(f"container: failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def call(*command: str, timeout_seconds: float = CALL_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail."""
    return subprocess.run(  # noqa: S603 - the commands of this file and of the image
        command, capture_output=True, text=True, timeout=timeout_seconds, check=False, cwd=ROOT
    )


def _works(client: str) -> bool:
    """Return whether containers can be run: a client may be installed without its daemon."""
    return shutil.which(client) is not None and call(client, "info").returncode == 0


class Client:
    """Docker, or Podman with the same commands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._image = f"imds-bridge:trial-{os.getpid()}"
        self._container = f"imds-bridge-trial-{os.getpid()}"

    def build(self, base: str | None, arguments: Sequence[str]) -> None:
        """Build the image, with further arguments of the builder; without `base`, on that of the Dockerfile."""
        chosen = [f"--build-arg=BASE={base}"] if base else []
        docker_format = (
            ["--format=docker"] if self.name == "podman" else []
        )  # OCI images have no health check
        options = [*docker_format, *chosen, *arguments, f"--tag={self._image}"]
        run(self.name, "build", *options, ".", timeout_seconds=BUILD_SECONDS)

    def config(self) -> dict[str, Any]:
        """Return what the image says of how it is run."""
        output = run(self.name, "image", "inspect", "--format", "{{json .Config}}", self._image)
        config: dict[str, Any] = json.loads(output)
        return config

    def size(self) -> str:
        """Return how large the image is, its base included."""
        return run(self.name, "images", "--format", "{{.Size}}", self._image)

    def start(self, environ: Mapping[str, str]) -> None:
        """Run the image as it says, on the host's network and with a root that is read-only."""
        rights = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp"]
        settings = [f"--env={name}={value}" for name, value in environ.items()]
        options = ["--detach", "--network=host", f"--name={self._container}", *rights, *settings]
        run(self.name, "run", *options, self._image)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the process, as its user."""
        return call(self.name, "exec", self._container, *command)

    def stop(self, timeout_seconds: float) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        run(self.name, "kill", "--signal=TERM", self._container)
        return int(run(self.name, "wait", self._container, timeout_seconds=timeout_seconds))

    def close(self) -> None:
        """Remove the container and the image."""
        call(self.name, "rm", "--force", "--volumes", self._container)
        call(self.name, "rmi", "--force", self._image)


# The root is mounted read-only, with a separate state folder; with a new /proc, the process sees itself as number 1.
_ENTER = f"""
root=$1 state=$2; shift 2
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount --bind "$state" "$root{STATE}"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
exec chroot "$root" "$@"
"""


class Buildah:
    """Buildah with chroot isolation, which needs no container runtime; unshare runs the image."""

    name = "buildah"

    def __init__(self) -> None:
        self._cleanup = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="imds-bridge-trial-"))
        self._folder.chmod(0o755)
        self._image = "localhost/imds-bridge:trial"
        lies_on = run("stat", "--file-system", "--format=%T", str(self._folder))
        self._driver = "vfs" if lies_on == "overlayfs" else "overlay"  # overlayfs does not work on overlayfs
        self._cleanup.callback(shutil.rmtree, self._folder)
        self._cleanup.callback(call, "umount", str(self._folder / "storage" / "overlay"))  # Buildah leaves it
        self._cleanup.callback(lambda: self._buildah("rm", "--all"))

    def build(self, base: str | None, arguments: Sequence[str]) -> None:
        """Build the image, with further arguments of the builder; without `base`, on one made by mmdebstrap."""
        options = ["--isolation=chroot", "--format=docker", "--layers=false", "--timestamp=0", *arguments]
        chosen = f"--build-arg=BASE={base or self._make_base()}"
        self._buildah("build", *options, chosen, f"--tag={self._image}", ".")

    def config(self) -> dict[str, Any]:
        """Return what the image says of how it is run."""
        config: dict[str, Any] = json.loads(self._buildah("inspect", "--type=image", self._image))
        return dict(config["Docker"]["config"])

    def size(self) -> str:
        """Return how large the image is, its base included."""
        return self._buildah("images", "--format", "{{.Size}}", self._image)

    def start(self, environ: Mapping[str, str]) -> None:
        """Run the image as it says, on the host's network and with a root that is read-only."""
        config = self.config()
        user, group = config["User"].split(":")
        root = self._buildah("mount", self._buildah("from", self._image))
        state = self._folder / "state"
        shutil.copytree(f"{root}{STATE}", state)
        os.chown(state, int(user), int(group))  # as for a new volume
        rights = ["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        settings = [f"{name}={value}" for name, value in environ.items()]
        self._as_user = ["setpriv", f"--reuid={user}", f"--regid={group}", *rights]
        self._as_user += ["env", "--ignore-environment", *config["Env"], *settings]
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        enter = ["sh", "-ec", _ENTER, "sh", root, str(state), *self._as_user]
        self._process = subprocess.Popen([*spaces, *enter, *config["Entrypoint"], *config["Cmd"]])  # noqa: S603
        self._cleanup.callback(self._process.wait, CALL_SECONDS)
        self._cleanup.callback(self._process.kill)

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside the process, as its user."""
        spaces = [f"--target={self._first()}", "--mount", "--pid", "--root", "--wd"]
        return call("nsenter", *spaces, *self._as_user, *command)

    def stop(self, timeout_seconds: float) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        run("kill", "-TERM", self._first())
        return self._process.wait(timeout_seconds)

    def close(self) -> None:
        """Kill the process if it still runs, and remove everything that was created."""
        self._cleanup.close()

    def _make_base(self) -> str:
        container = self._buildah("from", "scratch")
        folder = self._buildah("mount", container)
        options = ["--variant=minbase", "--dpkgopt=force-unsafe-io", f"--include={PACKAGES}", SUITE, folder]
        run("mmdebstrap", *options, timeout_seconds=BUILD_SECONDS)
        return self._buildah("commit", "--quiet", "--rm", container)

    def _first(self) -> str:
        """Return the process id, seen from here, of the container's first process."""
        pid = self._process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").strip()

    def _buildah(self, *arguments: str) -> str:
        storage = [f"--root={self._folder}/storage", f"--runroot={self._folder}/run"]
        return run(
            "buildah", *storage, f"--storage-driver={self._driver}", *arguments, timeout_seconds=BUILD_SECONDS
        )
